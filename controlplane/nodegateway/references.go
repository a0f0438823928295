package nodegateway

import (
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
)

// everywhere lists the objects that every node gets regardless of its pods: the configuration of
// cluster DNS, which agents serve. It must stay short, because every node holds each object.
var everywhere = []key{{kindConfigMap, metav1.NamespaceSystem, "coredns"}}

// references returns the objects that a node needs because it holds o. Pods refer to their
// configuration and claims, claims to volumes, volumes to CSI drivers and Secrets. The graph has no
// cycles. A volume is held only for the claim that it is bound to (assignment.bound).
func references(o api.Object) []key {
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

// refSet collects keys without duplicates, in order.
type refSet struct {
	seen map[key]bool
	list []key
}

func (r *refSet) add(k kind, namespace, name string) {
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

// kindOfResource maps resource names in pod references to kinds that are sent to agents.
var kindOfResource = map[string]kind{
	"serviceaccounts": kindServiceAccount, "secrets": kindSecret, "configmaps": kindConfigMap,
	"persistentvolumeclaims": kindClaim, "csidrivers": kindCSIDriver,
	"resourceclaims": kindDeviceClaim,
}

// podReferences returns the references of a pod. A mirror pod has none, because its node wrote the
// pod and could name any object.
func podReferences(p *v1.Pod) []key {
	if podref.IsMirror(p) {
		return nil
	}
	var r refSet
	if p.Spec.RuntimeClassName != nil { // not a restricted object: every node may read all RuntimeClasses
		r.add(kindRuntimeClass, "", *p.Spec.RuntimeClassName)
	}
	for ref := range podref.Of(p) {
		if k, ok := kindOfResource[ref.Resource]; ok {
			r.add(k, ref.Namespace, ref.Name)
		}
	}
	return r.list
}

func claimReferences(c *v1.PersistentVolumeClaim) []key {
	var r refSet
	r.add(kindPersistentVolume, "", c.Spec.VolumeName)
	if c.Spec.StorageClassName != nil {
		r.add(kindStorageClass, "", *c.Spec.StorageClassName)
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
		r.add(kindSecret, namespace, d.SecretRef.Name)
	}
	csi := v.Spec.CSI
	if csi == nil {
		return r.list
	}
	r.add(kindCSIDriver, "", csi.Driver)
	for _, s := range []*v1.SecretReference{csi.NodeStageSecretRef, csi.NodePublishSecretRef, csi.NodeExpandSecretRef} {
		if s != nil {
			r.add(kindSecret, s.Namespace, s.Name)
		}
	}
	return r.list
}
