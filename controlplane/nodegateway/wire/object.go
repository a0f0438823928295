package wire

import (
	"fmt"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// WireGuardKey is the Node annotation with the node's WireGuard public key. Nodes without WireGuard
// do not set it.
const WireGuardKey = "keelson.dev/wireguard-key"

// marshaler is implemented by generated API types: it encodes an object as protobuf.
type marshaler interface{ Marshal() ([]byte, error) }

// k8sMagic is the prefix of the protobuf envelope of Kubernetes objects.
var k8sMagic = []byte{'k', '8', 's', 0}

// EncodeObject returns an object as it is sent to agents: in a protobuf envelope with its API
// version and kind.
func EncodeObject(apiVersion, kind string, o api.Object) (*fleetv1.Object, error) {
	m, ok := o.(marshaler)
	if !ok {
		return nil, fmt.Errorf("encode %s %s: %T has no protobuf form", kind, o.GetName(), o)
	}
	body, err := m.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", kind, o.GetName(), err)
	}
	u := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: apiVersion, Kind: kind}, Raw: body}
	env, err := u.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", kind, o.GetName(), err)
	}
	return &fleetv1.Object{
		Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName(),
		Revision: RevisionOf(o), Raw: append(append(make([]byte, 0, len(env)+4), k8sMagic...), env...),
	}, nil
}

// DecodeObject decodes raw, an object in a protobuf envelope, into out. It returns an error if the
// kind in the envelope is not kind.
func DecodeObject(raw []byte, kind string, out interface{ Unmarshal([]byte) error }) error {
	if len(raw) < 4 || string(raw[:4]) != string(k8sMagic) {
		return fmt.Errorf("decode %s: not a Kubernetes protobuf", kind)
	}
	var u runtime.Unknown
	if err := u.Unmarshal(raw[4:]); err != nil {
		return fmt.Errorf("decode %s: %w", kind, err)
	}
	if u.Kind != kind {
		return fmt.Errorf("decode %s: envelope holds a %s", kind, u.Kind)
	}
	if err := decodelimits.CheckProto(u.Raw, out); err != nil {
		return fmt.Errorf("decode %s: %w", kind, err)
	}
	if err := out.Unmarshal(u.Raw); err != nil {
		return fmt.Errorf("decode %s: %w", kind, err)
	}
	return nil
}

// RevisionOf returns the store revision of an object, which is its resourceVersion, or 0 if it has
// none.
func RevisionOf(o api.Object) uint64 {
	n, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// maxNameBytes is the maximum total length of the names of one object in a message. Valid names are
// shorter.
const maxNameBytes = 4 << 10

// CheckNameLengths returns an error if the total length of names exceeds maxNameBytes, so that they
// cannot be the names of one object.
func CheckNameLengths(names ...string) error {
	all := 0
	for _, n := range names {
		all += len(n)
	}
	if all > maxNameBytes {
		return fmt.Errorf("the names in a message have %d bytes, more than %d", all, maxNameBytes)
	}
	return nil
}

// ExtendedResources returns the extended resources in list, or nil if there are none.
func ExtendedResources(list v1.ResourceList) v1.ResourceList {
	var out v1.ResourceList
	for name, q := range list {
		if isExtendedResource(name) {
			if out == nil {
				out = make(v1.ResourceList)
			}
			out[name] = q
		}
	}
	return out
}

// isExtendedResource reports whether a resource is an extended resource: its name has a domain
// other than kubernetes.io.
func isExtendedResource(name v1.ResourceName) bool {
	domain, _, ok := strings.Cut(string(name), "/")
	return ok && domain != "kubernetes.io" && !strings.HasSuffix(domain, ".kubernetes.io") &&
		!strings.HasPrefix(domain, "requests.")
}
