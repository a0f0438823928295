package nodegateway

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/controlplane/client"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// kind is an object kind that is sent to agents. The order is the order of sending: objects that a
// pod references come before the pod.
type kind uint8

const (
	kindNode kind = iota
	kindService
	kindEndpointSlice
	kindStorageClass
	kindCSIDriver
	kindRuntimeClass
	kindVolumeAttachment
	kindPersistentVolume
	kindClaim
	kindDeviceClaim
	kindServiceAccount
	kindConfigMap
	kindSecret
	kindAddressGroup // before the policies that reference it
	kindNetworkPolicy
	kindPod
	kindCount
)

// kindInfo describes how a kind is named and distributed.
type kindInfo struct {
	name, apiVersion string
	// everyone is true for kinds of which every node gets every object.
	everyone bool
	informer func(*client.Informers) cache.SharedIndexInformer // nil: the kind is not stored
}

var kinds = [kindCount]kindInfo{
	kindNode:             {"Node", "v1", true, client.Informer[*v1.Node]},
	kindService:          {"Service", "v1", true, client.Informer[*v1.Service]},
	kindEndpointSlice:    {"EndpointSlice", "discovery.k8s.io/v1", true, client.Informer[*discoveryv1.EndpointSlice]},
	kindStorageClass:     {"StorageClass", "storage.k8s.io/v1", false, client.Informer[*storagev1.StorageClass]},
	kindCSIDriver:        {"CSIDriver", "storage.k8s.io/v1", false, client.Informer[*storagev1.CSIDriver]},
	kindRuntimeClass:     {"RuntimeClass", "node.k8s.io/v1", false, client.Informer[*nodev1.RuntimeClass]},
	kindVolumeAttachment: {"VolumeAttachment", "storage.k8s.io/v1", false, client.Informer[*storagev1.VolumeAttachment]},
	kindPersistentVolume: {"PersistentVolume", "v1", false, client.Informer[*v1.PersistentVolume]},
	kindClaim:            {"PersistentVolumeClaim", "v1", false, client.Informer[*v1.PersistentVolumeClaim]},
	kindDeviceClaim:      {"ResourceClaim", "resource.k8s.io/v1", false, client.Informer[*resourcev1.ResourceClaim]},
	kindServiceAccount:   {"ServiceAccount", "v1", false, client.Informer[*v1.ServiceAccount]},
	kindConfigMap:        {"ConfigMap", "v1", false, client.Informer[*v1.ConfigMap]},
	kindSecret:           {"Secret", "v1", false, client.Informer[*v1.Secret]},
	kindAddressGroup:     {"AddressGroup", "v1", false, nil}, // computed by package policy
	kindNetworkPolicy:    {"NetworkPolicy", "networking.k8s.io/v1", false, client.Informer[*networkingv1.NetworkPolicy]},
	kindPod:              {"Pod", "v1", false, client.Informer[*v1.Pod]},
}

// key identifies an object.
type key struct {
	kind            kind
	namespace, name string
}

func keyOf(k kind, o api.Object) key { return key{k, o.GetNamespace(), o.GetName()} }

// storeKey returns the key of the object in an informer's store.
func (k key) storeKey() string {
	if k.namespace == "" {
		return k.name
	}
	return k.namespace + "/" + k.name
}

// revisionOf returns the store revision of an object, or 0 if it has none.
func revisionOf(o api.Object) uint64 {
	n, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// marshaler is the protobuf encoder of generated API types.
type marshaler interface{ Marshal() ([]byte, error) }

// k8sMagic is the prefix of the protobuf envelope of Kubernetes objects.
var k8sMagic = []byte{'k', '8', 's', 0}

// slimNode returns a Node with only the fields that an agent needs. These are identity, CIDRs,
// addresses, attached volumes and, for pod admission, labels, taints and extended resources. The
// rest, above all the images, is large and changes often.
func slimNode(n *v1.Node) *v1.Node {
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, Labels: n.Labels, Annotations: n.Annotations},
		Spec:       n.Spec,
		Status: v1.NodeStatus{Addresses: n.Status.Addresses, Allocatable: extended(n.Status.Allocatable),
			VolumesInUse: n.Status.VolumesInUse, VolumesAttached: n.Status.VolumesAttached, Conditions: attaching(n)},
	}
}

// attaching returns the status of the Ready condition of a node with attached volumes, otherwise
// nil. The node mounts attached volumes only when it is known to be Ready.
func attaching(n *v1.Node) []v1.NodeCondition {
	ready := findNodeCondition(n.Status.Conditions, v1.NodeReady)
	if len(n.Status.VolumesInUse) == 0 || ready == nil {
		return nil
	}
	return []v1.NodeCondition{{Type: ready.Type, Status: ready.Status}}
}

// extended returns the extended resources of a list, or nil.
func extended(all v1.ResourceList) v1.ResourceList {
	var out v1.ResourceList
	for name, q := range all {
		if isExtended(name) {
			if out == nil {
				out = make(v1.ResourceList)
			}
			out[name] = q
		}
	}
	return out
}

// isExtended reports whether a resource name is that of an extended resource: it has a domain other
// than kubernetes.io.
func isExtended(name v1.ResourceName) bool {
	domain, _, ok := strings.Cut(string(name), "/")
	return ok && domain != "kubernetes.io" && !strings.HasSuffix(domain, ".kubernetes.io") &&
		!strings.HasPrefix(domain, "requests.")
}

// sameSlim reports whether two Nodes are equal for agents, that is, have the same slimNode.
func sameSlim(a, b *v1.Node) bool {
	return a.UID == b.UID && maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations) &&
		equality.Semantic.DeepEqual(a.Spec, b.Spec) && slices.Equal(a.Status.Addresses, b.Status.Addresses) &&
		equality.Semantic.DeepEqual(extended(a.Status.Allocatable), extended(b.Status.Allocatable)) &&
		slices.Equal(a.Status.VolumesInUse, b.Status.VolumesInUse) && slices.Equal(a.Status.VolumesAttached, b.Status.VolumesAttached) &&
		slices.EqualFunc(attaching(a), attaching(b), func(x, y v1.NodeCondition) bool { return x.Status == y.Status })
}

// encode returns the wire form of an object.
func encode(k kind, o api.Object) (*fleetv1.Object, error) {
	if n, ok := o.(*v1.Node); ok {
		o = slimNode(n)
	}
	m, ok := o.(marshaler)
	if !ok {
		return nil, fmt.Errorf("encode %s %s: %T has no protobuf form", kinds[k].name, o.GetName(), o)
	}
	body, err := m.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", kinds[k].name, o.GetName(), err)
	}
	u := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: kinds[k].apiVersion, Kind: kinds[k].name}, Raw: body}
	env, err := u.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", kinds[k].name, o.GetName(), err)
	}
	return &fleetv1.Object{
		Kind: kinds[k].name, Namespace: o.GetNamespace(), Name: o.GetName(),
		Revision: revisionOf(o), Raw: append(append(make([]byte, 0, len(env)+4), k8sMagic...), env...),
	}, nil
}

// decode reads the wire form raw into out. It fails if the envelope's kind is not wantKind.
func decode(raw []byte, wantKind string, out interface{ Unmarshal([]byte) error }) error {
	if len(raw) < 4 || string(raw[:4]) != string(k8sMagic) {
		return fmt.Errorf("decode %s: not a Kubernetes protobuf", wantKind)
	}
	var u runtime.Unknown
	if err := u.Unmarshal(raw[4:]); err != nil {
		return fmt.Errorf("decode %s: %w", wantKind, err)
	}
	if u.Kind != wantKind {
		return fmt.Errorf("decode %s: envelope holds a %s", wantKind, u.Kind)
	}
	if err := decodelimits.CheckProto(u.Raw, out); err != nil {
		return fmt.Errorf("decode %s: %w", wantKind, err)
	}
	if err := out.Unmarshal(u.Raw); err != nil {
		return fmt.Errorf("decode %s: %w", wantKind, err)
	}
	return nil
}

// encodings caches the wire form of shared objects, so that each revision is encoded once for all
// sessions. Pods and Secrets are not cached.
type encodings struct {
	mu    sync.Mutex
	byUID map[types.UID]*fleetv1.Object
}

func newEncodings() *encodings { return &encodings{byUID: make(map[types.UID]*fleetv1.Object)} }

// get returns the wire form of o. The result is shared and must not be modified.
func (e *encodings) get(k kind, o api.Object) (*fleetv1.Object, error) {
	if k == kindPod || k == kindSecret || o.GetUID() == "" {
		return encode(k, o)
	}
	rev := revisionOf(o)
	e.mu.Lock()
	have := e.byUID[o.GetUID()]
	e.mu.Unlock()
	if have != nil && have.Revision == rev {
		return have, nil
	}
	enc, err := encode(k, o)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if have := e.byUID[o.GetUID()]; have == nil || have.Revision < rev {
		e.byUID[o.GetUID()] = enc
	}
	return enc, nil
}

func (e *encodings) forget(uid types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.byUID, uid)
}
