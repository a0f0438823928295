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

// ownHandlers are the handler names that every node's runtime accepts, in addition to "". "runc" is
// accepted because libcontainer is the core of runc.
var ownHandlers = []string{"keelson", "runc"}

// handlers returns all accepted handler names of this node, without "" and without duplicates.
func (c *Config) handlers() []string {
	out := slices.Clone(ownHandlers)
	for _, h := range c.Handlers {
		if h != "" && !slices.Contains(out, h) {
			out = append(out, h)
		}
	}
	return out
}

// checkHandler rejects a sandbox if this node does not have its runtime handler.
func (c *Config) checkHandler(want string, m *cri.PodSandboxMetadata) error {
	have := c.handlers()
	if want == "" || slices.Contains(have, want) {
		return nil
	}
	return status.Errorf(codes.InvalidArgument,
		"no runtime for handler %q is configured on this node, as the RuntimeClass of pod %s/%s asks; it has %s: let the class name one of these, or select nodes that have it by scheduling.nodeSelector",
		want, m.GetNamespace(), m.GetName(), strings.Join(have, ", "))
}

// ParseHandler parses a handler flag: NAME, an additional name of the node's own runtime.
func ParseHandler(s string) (name string, err error) {
	if name, program, external := strings.Cut(s, "="); external {
		return "", fmt.Errorf("handler %q cannot run %q: this agent runs pods with its own runtime and starts no other OCI runtime; "+
			"NAME alone makes it answer to another name", name, program)
	}
	return s, nil
}

// runtimeHandlers describes all handlers, "" first. They are one runtime with the same features.
func (c *Config) runtimeHandlers() []*cri.RuntimeHandler {
	out := make([]*cri.RuntimeHandler, 0, 1+len(ownHandlers)+len(c.Handlers))
	recursive := readOnlyRecursively()
	for _, name := range append([]string{""}, c.handlers()...) {
		out = append(out, &cri.RuntimeHandler{Name: name, Features: &cri.RuntimeHandlerFeatures{RecursiveReadOnlyMounts: recursive}})
	}
	return out
}

// readOnlyRecursively reports whether the kernel has mount_setattr (Linux 5.12). Without it, mounts
// below a read-only mount stay writable.
func readOnlyRecursively() bool {
	return !errors.Is(unix.MountSetattr(-1, "", 0, &unix.MountAttr{}), unix.ENOSYS)
}
