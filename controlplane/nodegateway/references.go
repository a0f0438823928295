package nodegateway

import (
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
)

// everywhere are objects of which every node is told, whatever runs there: the configuration of the cluster's DNS, which
// agents serve. They are no more than that: a kind of which every node is told costs each the whole of it.
var everywhere = []key{{kindConfigMap, metav1.NamespaceSystem, "coredns"}}

// references lists what a node must hold besides o because it holds o: pods lead to their
// configuration and claims, claims to volumes, volumes to drivers and their secrets. The graph has no cycles. A volume is
// held for the claim alone to which it is bound (assignment.bound).
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

// kindOfResource is how references name the kinds that travel to agents.
var kindOfResource = map[string]kind{
	"serviceaccounts": kindServiceAccount, "secrets": kindSecret, "configmaps": kindConfigMap,
	"persistentvolumeclaims": kindClaim, "csidrivers": kindCSIDriver,
	"resourceclaims": kindDeviceClaim,
}

// podReferences grants a mirror pod nothing: its node has written it.
func podReferences(p *v1.Pod) []key {
	if podref.IsMirror(p) {
		return nil
	}
	var r refSet
	if p.Spec.RuntimeClassName != nil { // it names the handler, and every node may read all classes
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
