"""Asks a curator what it serves, and what the cluster is, with none of this project's code.

Everything about the messages is learnt by reflection: no file of Polis is read.
Prints one JSON document.
"""

import asyncio
import json
import ssl
import sys

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.reflection.v1.reflection_grpc import ServerReflectionStub
from grpclib.reflection.v1.reflection_pb2 import ServerReflectionRequest

SERVICE = "polis.v1.Management"


async def ask(channel, **question):
    request = ServerReflectionRequest(**question)
    (answer,) = await ServerReflectionStub(channel).ServerReflectionInfo([request])
    return answer


async def files(channel, **question):
    answer = await ask(channel, **question)
    encoded = answer.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(each) for each in encoded]


async def learn(channel, pool):
    """Adds the file of the service to the pool, after all that it imports."""
    known = {}
    wanted = await files(channel, file_containing_symbol=SERVICE)
    while wanted:
        file = wanted.pop()
        known[file.name] = file
        for name in file.dependency:
            if name not in known:
                wanted += await files(channel, file_by_filename=name)

    added = set()

    def add(name):
        if name not in added:
            added.add(name)
            for dependency in known[name].dependency:
                add(dependency)
            pool.Add(known[name])

    for name in sorted(known):
        add(name)


async def main(host, port, node, ca, certificate, key):
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    # A node proves its ID, wherever it is.
    config = Configuration(ssl_target_name_override=node)
    async with Channel(host, int(port), ssl=context, config=config) as channel:
        listed = await ask(channel, list_services="")
        services = sorted(each.name for each in listed.list_services_response.service)
        pool = descriptor_pool.DescriptorPool()
        await learn(channel, pool)
        method = pool.FindMethodByName(f"{SERVICE}.GetClusterInfo")
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        call = UnaryUnaryMethod(channel, f"/{SERVICE}/GetClusterInfo", request, response)
        info = await call(request(), timeout=10)
        print(json.dumps({"services": services, "info": json_format.MessageToDict(info)}))


asyncio.run(main(*sys.argv[1:]))
