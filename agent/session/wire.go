package session

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// wireObject is an API object that can be encoded in protobuf.
type wireObject interface {
	metav1.Object
	Marshal() ([]byte, error)
	Unmarshal([]byte) error
}

// newObject returns an empty object of a kind that the control plane sends, or nil for a kind that
// this version does not know.
func newObject(kind string) wireObject {
	switch kind {
	case "Pod":
		return &v1.Pod{}
	case "Node":
		return &v1.Node{}
	case "Service":
		return &v1.Service{}
	case "EndpointSlice":
		return &discoveryv1.EndpointSlice{}
	case "ConfigMap":
		return &v1.ConfigMap{}
	case "Secret":
		return &v1.Secret{}
	case "ServiceAccount":
		return &v1.ServiceAccount{}
	case "PersistentVolumeClaim":
		return &v1.PersistentVolumeClaim{}
	case "PersistentVolume":
		return &v1.PersistentVolume{}
	case "StorageClass":
		return &storagev1.StorageClass{}
	case "CSIDriver":
		return &storagev1.CSIDriver{}
	case "VolumeAttachment":
		return &storagev1.VolumeAttachment{}
	case "RuntimeClass":
		return &nodev1.RuntimeClass{}
	case "ResourceClaim":
		return &resourcev1.ResourceClaim{}
	case "NetworkPolicy":
		return &networkingv1.NetworkPolicy{}
	case kindAddressGroup:
		return &v1.Endpoints{}
	case "Namespace":
		return &v1.Namespace{}
	}
	return nil
}

// kindAddressGroup is the kind of objects with the pod addresses that a peer of a NetworkPolicy
// selects. They are encoded as Endpoints.
const kindAddressGroup = "AddressGroup"

// kindNames lists all kinds that Session.Changes may report.
var kindNames = []string{"Pod", "Node", kindPeer, "Service", "EndpointSlice", "ConfigMap", "Secret", "ServiceAccount",
	"PersistentVolumeClaim", "PersistentVolume", "StorageClass", "CSIDriver", "VolumeAttachment", "RuntimeClass",
	"ResourceClaim", "Namespace",
	"NetworkPolicy", kindAddressGroup}

// apiVersions maps a kind to its API version. A kind that is not listed has version v1.
var apiVersions = map[string]string{
	"EndpointSlice": "discovery.k8s.io/v1", "StorageClass": "storage.k8s.io/v1", "CSIDriver": "storage.k8s.io/v1",
	"VolumeAttachment": "storage.k8s.io/v1",
	"RuntimeClass":     "node.k8s.io/v1", "ResourceClaim": "resource.k8s.io/v1",
	"NetworkPolicy": "networking.k8s.io/v1",
}

const protobufMagic = "k8s\x00" // prefix of the protobuf envelope of Kubernetes objects

// encodeObject returns the object encoded in the protobuf envelope of Kubernetes.
func encodeObject(kind string, o wireObject) ([]byte, error) {
	body, err := o.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", kind, o.GetName(), err)
	}
	version := apiVersions[kind]
	if version == "" {
		version = "v1"
	}
	u := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: version, Kind: kind}, Raw: body}
	env, err := u.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", kind, o.GetName(), err)
	}
	return append([]byte(protobufMagic), env...), nil
}

// decodeObject decodes an object that the control plane sent. It returns nil without an error for a
// kind that this version does not know.
func decodeObject(o *fleetv1.Object) (wireObject, error) {
	out := newObject(o.Kind)
	if out == nil {
		return nil, nil
	}
	if len(o.Raw) < len(protobufMagic) || string(o.Raw[:len(protobufMagic)]) != protobufMagic {
		return nil, fmt.Errorf("decode %s %s/%s: not a Kubernetes protobuf", o.Kind, o.Namespace, o.Name)
	}
	var u runtime.Unknown
	if err := u.Unmarshal(o.Raw[len(protobufMagic):]); err != nil {
		return nil, fmt.Errorf("decode %s %s/%s: %w", o.Kind, o.Namespace, o.Name, err)
	}
	if err := out.Unmarshal(u.Raw); err != nil {
		return nil, fmt.Errorf("decode %s %s/%s: %w", o.Kind, o.Namespace, o.Name, err)
	}
	return out, nil
}
