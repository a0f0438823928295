package assign

import (
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// kind is a kind of objects that are sent to agents. The order of the constants is the order of
// sending: objects to which a pod refers are sent before the pod.
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
	// onAllNodes is true if every node gets every object of the kind.
	onAllNodes bool
	informer   func(*client.Informers) cache.SharedIndexInformer // nil if objects of the kind are not stored
}

var kinds = [kindCount]kindInfo{
	kindNode:          {"Node", "v1", true, client.Informer[*v1.Node]},
	kindService:       {"Service", "v1", true, client.Informer[*v1.Service]},
	kindEndpointSlice: {"EndpointSlice", "discovery.k8s.io/v1", true, client.Informer[*discoveryv1.EndpointSlice]},
	kindStorageClass:  {"StorageClass", "storage.k8s.io/v1", false, client.Informer[*storagev1.StorageClass]},
	kindCSIDriver:     {"CSIDriver", "storage.k8s.io/v1", false, client.Informer[*storagev1.CSIDriver]},
	kindRuntimeClass:  {"RuntimeClass", "node.k8s.io/v1", false, client.Informer[*nodev1.RuntimeClass]},
	kindVolumeAttachment: {"VolumeAttachment", "storage.k8s.io/v1", false,
		client.Informer[*storagev1.VolumeAttachment]},
	kindPersistentVolume: {"PersistentVolume", "v1", false, client.Informer[*v1.PersistentVolume]},
	kindClaim:            {"PersistentVolumeClaim", "v1", false, client.Informer[*v1.PersistentVolumeClaim]},
	kindDeviceClaim:      {"ResourceClaim", "resource.k8s.io/v1", false, client.Informer[*resourcev1.ResourceClaim]},
	kindServiceAccount:   {"ServiceAccount", "v1", false, client.Informer[*v1.ServiceAccount]},
	kindConfigMap:        {"ConfigMap", "v1", false, client.Informer[*v1.ConfigMap]},
	kindSecret:           {"Secret", "v1", false, client.Informer[*v1.Secret]},
	kindAddressGroup:     {"AddressGroup", "v1", false, nil}, // computed by package policy
	kindNetworkPolicy: {"NetworkPolicy", "networking.k8s.io/v1", false,
		client.Informer[*networkingv1.NetworkPolicy]},
	kindPod: {"Pod", "v1", false, client.Informer[*v1.Pod]},
}

// key identifies an object.
type key struct {
	kind            kind
	namespace, name string
}

func keyOf(k kind, o api.Object) key { return key{k, o.GetNamespace(), o.GetName()} }

// storeKey returns the key of the object in the informer cache.
func (k key) storeKey() string {
	if k.namespace == "" {
		return k.name
	}
	return k.namespace + "/" + k.name
}

// slimNode returns a Node with only the fields that an agent needs. These are identity, CIDRs,
// addresses, attached volumes and, for pod admission, labels, taints and extended resources. Other
// fields, such as images, are large and change often.
func slimNode(n *v1.Node) *v1.Node {
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, Labels: n.Labels,
			Annotations: n.Annotations},
		Spec: n.Spec,
		Status: v1.NodeStatus{Addresses: n.Status.Addresses, Allocatable: wire.ExtendedResources(n.Status.Allocatable),
			VolumesInUse: n.Status.VolumesInUse, VolumesAttached: n.Status.VolumesAttached,
			Conditions: attachmentConditions(n)},
	}
}

// attachmentConditions returns the Ready condition of a node that has attached volumes, with only
// its type and status, and nil for other nodes. An agent mounts attached volumes only after the
// control plane has confirmed that its node is Ready.
func attachmentConditions(n *v1.Node) []v1.NodeCondition {
	ready := api.NodeCondition(n, v1.NodeReady)
	if len(n.Status.VolumesInUse) == 0 || ready == nil {
		return nil
	}
	return []v1.NodeCondition{{Type: ready.Type, Status: ready.Status}}
}

// equalSlimNodes reports whether the slimNodes of two Nodes are equal, so that agents need no
// update.
func equalSlimNodes(a, b *v1.Node) bool {
	return a.UID == b.UID && maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations) &&
		equality.Semantic.DeepEqual(a.Spec, b.Spec) && slices.Equal(a.Status.Addresses, b.Status.Addresses) &&
		equality.Semantic.DeepEqual(wire.ExtendedResources(a.Status.Allocatable),
			wire.ExtendedResources(b.Status.Allocatable)) &&
		slices.Equal(a.Status.VolumesInUse, b.Status.VolumesInUse) &&
		slices.Equal(a.Status.VolumesAttached, b.Status.VolumesAttached) &&
		slices.EqualFunc(attachmentConditions(a), attachmentConditions(b),
			func(x, y v1.NodeCondition) bool { return x.Status == y.Status })
}

// encodeObject returns an object as it is sent to agents. A Node is reduced with slimNode.
func encodeObject(k kind, o api.Object) (*fleetv1.Object, error) {
	if n, ok := o.(*v1.Node); ok {
		o = slimNode(n)
	}
	return wire.EncodeObject(kinds[k].apiVersion, kinds[k].name, o)
}

// encodings caches the encoded objects that many nodes get, so that each revision is encoded once
// for all sessions. Pods and Secrets are not cached.
type encodings struct {
	mu    sync.Mutex
	byUID map[types.UID]*fleetv1.Object
}

func newEncodings() *encodings { return &encodings{byUID: make(map[types.UID]*fleetv1.Object)} }

// encodeOnce returns the encoded o. The result is shared and must not be modified.
func (e *encodings) encodeOnce(k kind, o api.Object) (*fleetv1.Object, error) {
	if k == kindPod || k == kindSecret || o.GetUID() == "" {
		return encodeObject(k, o)
	}
	rev := wire.RevisionOf(o)
	e.mu.Lock()
	have := e.byUID[o.GetUID()]
	e.mu.Unlock()
	if have != nil && have.Revision == rev {
		return have, nil
	}
	enc, err := encodeObject(k, o)
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

func (e *encodings) forgetObject(uid types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.byUID, uid)
}
