package oci

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// builtinHandlers are the RuntimeClass handler names that every node accepts, in addition to "".
// "runc" is accepted because libcontainer is the core of runc.
var builtinHandlers = []string{"keelson", "runc"}

// handlerNames returns all accepted handler names of this node, without "" and without duplicates.
func (c *Config) handlerNames() []string {
	out := slices.Clone(builtinHandlers)
	for _, h := range c.Handlers {
		if h != "" && !slices.Contains(out, h) {
			out = append(out, h)
		}
	}
	return out
}

// checkHandler returns an error if this node does not have the runtime handler of a sandbox.
func (c *Config) checkHandler(handler string, metadata *cri.PodSandboxMetadata) error {
	names := c.handlerNames()
	if handler == "" || slices.Contains(names, handler) {
		return nil
	}
	return status.Errorf(codes.InvalidArgument,
		"no runtime for handler %q is configured on this node, but the RuntimeClass of pod %s/%s requires it; the "+
			"node has %s: use one of these in the RuntimeClass, or select nodes that have it with "+
			"scheduling.nodeSelector",
		handler, metadata.GetNamespace(), metadata.GetName(), strings.Join(names, ", "))
}

// ParseHandler parses the value of a handler flag: NAME, an additional RuntimeClass handler name
// for the node's own runtime.
func ParseHandler(text string) (name string, err error) {
	if name, program, external := strings.Cut(text, "="); external {
		return "", fmt.Errorf(
			"handler %q cannot run %q: this agent runs pods with its own runtime and starts no other OCI runtime; "+
				"use NAME alone to add a handler name", name, program)
	}
	return text, nil
}

// describeHandlers describes all handlers, "" first. They are one runtime with the same features.
func (c *Config) describeHandlers() []*cri.RuntimeHandler {
	out := make([]*cri.RuntimeHandler, 0, 1+len(builtinHandlers)+len(c.Handlers))
	recursive := supportsRecursiveReadOnly()
	for _, name := range append([]string{""}, c.handlerNames()...) {
		out = append(out, &cri.RuntimeHandler{Name: name,
			Features: &cri.RuntimeHandlerFeatures{RecursiveReadOnlyMounts: recursive}})
	}
	return out
}

// supportsRecursiveReadOnly reports whether the kernel has mount_setattr (Linux 5.12). Without it,
// mounts below a read-only mount stay writable.
func supportsRecursiveReadOnly() bool {
	return !errors.Is(unix.MountSetattr(-1, "", 0, &unix.MountAttr{}), unix.ENOSYS)
}
