package assign

import (
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
)

// objectsOnAllNodes are the objects that every node gets regardless of its pods: the configuration
// of cluster DNS, which agents serve. The list must stay short, because every node holds each
// object.
var objectsOnAllNodes = []key{{kindConfigMap, metav1.NamespaceSystem, "coredns"}}

// objectReferences returns the objects that a node needs because it holds o. Pods refer to their
// configuration and claims, claims to volumes, volumes to CSI drivers and Secrets. The graph has no
// cycles. A volume is held only for the claim to which it is bound (assignment.isBoundToHeldClaim).
func objectReferences(o api.Object) []key {
	switch o := o.(type) {
	case *v1.Pod:
		return podReferences(o)
	case *v1.PersistentVolumeClaim:
		return claimReferences(o)
	case *v1.PersistentVolume:
		return volumeReferences(o)
	}
	return nil
}

// refSet collects keys without duplicates, in the order of their addition.
type refSet struct {
	seen map[key]bool
	list []key
}

func (r *refSet) addReference(k kind, namespace, name string) {
	ref := key{k, namespace, name}
	if name == "" || r.seen[ref] {
		return
	}
	if r.seen == nil {
		r.seen = make(map[key]bool)
	}
	r.seen[ref] = true
	r.list = append(r.list, ref)
}

// kindOfResource maps the resource names in pod references to the kinds that are sent to agents.
var kindOfResource = map[string]kind{
	"serviceaccounts": kindServiceAccount, "secrets": kindSecret, "configmaps": kindConfigMap,
	"persistentvolumeclaims": kindClaim, "csidrivers": kindCSIDriver,
	"resourceclaims": kindDeviceClaim,
}

// podReferences returns the objects to which a pod refers. It returns none for a mirror pod,
// because its node wrote the pod and could name any object.
func podReferences(pod *v1.Pod) []key {
	if podref.IsMirror(pod) {
		return nil
	}
	var r refSet
	if pod.Spec.RuntimeClassName != nil { // unrestricted: every node may read all RuntimeClasses
		r.addReference(kindRuntimeClass, "", *pod.Spec.RuntimeClassName)
	}
	for ref := range podref.References(pod) {
		if k, ok := kindOfResource[ref.Resource]; ok {
			r.addReference(k, ref.Namespace, ref.Name)
		}
	}
	return r.list
}

func claimReferences(c *v1.PersistentVolumeClaim) []key {
	var r refSet
	r.addReference(kindPersistentVolume, "", c.Spec.VolumeName)
	if c.Spec.StorageClassName != nil {
		r.addReference(kindStorageClass, "", *c.Spec.StorageClassName)
	}
	return r.list
}

func volumeReferences(v *v1.PersistentVolume) []key {
	var r refSet
	if d := v.Spec.ISCSI; d != nil && d.SecretRef != nil && (d.DiscoveryCHAPAuth || d.SessionCHAPAuth) {
		namespace := d.SecretRef.Namespace
		if namespace == "" && v.Spec.ClaimRef != nil {
			namespace = v.Spec.ClaimRef.Namespace
		}
		r.addReference(kindSecret, namespace, d.SecretRef.Name)
	}
	csi := v.Spec.CSI
	if csi == nil {
		return r.list
	}
	r.addReference(kindCSIDriver, "", csi.Driver)
	for _, s := range []*v1.SecretReference{csi.NodeStageSecretRef, csi.NodePublishSecretRef, csi.NodeExpandSecretRef} {
		if s != nil {
			r.addReference(kindSecret, s.Namespace, s.Name)
		}
	}
	return r.list
}
