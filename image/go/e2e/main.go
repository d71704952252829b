// E2e is the end-to-end suite of Kubernetes, in the version of the cluster. It is a tool
// of the host: no image has it.
//
// The packages are those with conformance tests, as upstream's own main (the test of
// k8s.io/kubernetes/test/e2e) imports them. Left out are those for Windows, for clouds
// and for the measurement of autoscalers: none of them has such a test.
package main

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.yaml.in/yaml/v2"
	"k8s.io/component-base/version"
	conformance "k8s.io/kubernetes/test/conformance/testdata"
	"k8s.io/kubernetes/test/e2e"
	"k8s.io/kubernetes/test/e2e/framework"
	"k8s.io/kubernetes/test/e2e/framework/config"
	"k8s.io/kubernetes/test/e2e/framework/testfiles"
	manifests "k8s.io/kubernetes/test/e2e/testing-manifests"
	fixtures "k8s.io/kubernetes/test/fixtures"

	_ "k8s.io/kubernetes/test/e2e/feature" // labels of tests, which must come first

	_ "k8s.io/kubernetes/test/e2e/apimachinery"
	_ "k8s.io/kubernetes/test/e2e/apps"
	_ "k8s.io/kubernetes/test/e2e/architecture"
	_ "k8s.io/kubernetes/test/e2e/auth"
	_ "k8s.io/kubernetes/test/e2e/common"
	_ "k8s.io/kubernetes/test/e2e/dra"
	_ "k8s.io/kubernetes/test/e2e/instrumentation"
	_ "k8s.io/kubernetes/test/e2e/kubectl"
	_ "k8s.io/kubernetes/test/e2e/network"
	_ "k8s.io/kubernetes/test/e2e/node"
	_ "k8s.io/kubernetes/test/e2e/scheduling"
	_ "k8s.io/kubernetes/test/e2e/storage"

	_ "k8s.io/kubernetes/test/e2e/framework/debug/init"   // events of a failed test
	_ "k8s.io/kubernetes/test/e2e/framework/metrics/init" // the framework asks for these
	_ "k8s.io/kubernetes/test/e2e/framework/node/init"
	_ "k8s.io/kubernetes/test/utils/ktesting/format" // readable objects in messages
)

func main() {
	showVersion := flag.Bool("version", false, "print the version and exit")
	list := flag.Bool("list-conformance-tests", false, "print the names of the conformance tests and exit")
	config.CopyFlags(config.Flags, flag.CommandLine)
	framework.RegisterCommonFlags(flag.CommandLine)
	framework.RegisterClusterFlags(flag.CommandLine)
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "e2e: unknown arguments %q; every option begins with --\n", flag.Args())
		os.Exit(2)
	}
	if *showVersion {
		fmt.Println(version.Get())
		return
	}
	for _, files := range []testfiles.FileSource{
		manifests.GetE2ETestingManifestsFS(),
		fixtures.GetTestFixturesFS(),
		conformance.GetConformanceTestdataFS(),
	} {
		testfiles.AddFileSource(files)
	}
	if *list {
		if err := printConformanceTests(); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
			os.Exit(1)
		}
		return
	}
	// Also serves the options that list images, labels and tests.
	framework.AfterReadingAllFlags(&framework.TestContext)
	var outcome testing.T
	e2e.RunE2ETests(&outcome)
	if outcome.Failed() {
		os.Exit(1)
	}
}

// PrintConformanceTests prints the full name of each test of the conformance list, which
// is a file of the suite, one a line. Upstream's option of this name prints the file.
func printConformanceTests() error {
	text, err := testfiles.Read("test/conformance/testdata/conformance.yaml")
	if err != nil {
		return err
	}
	var tests []struct {
		Name string `yaml:"codename"`
	}
	if err := yaml.Unmarshal(text, &tests); err != nil {
		return fmt.Errorf("cannot read the list of conformance tests: %w", err)
	}
	for _, test := range tests {
		fmt.Println(test.Name)
	}
	return nil
}
