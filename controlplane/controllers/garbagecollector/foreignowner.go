package garbagecollector

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// foreignOwner identifies an owner reference to an object in another namespace.
type foreignOwner struct{ dependent, owner types.UID }

// reportForeignOwner records a Warning Event of obj if owner reference r names an object that
// exists in another namespace than obj. Such a reference is invalid. The Event is recorded once in
// a term of leadership. o is the kind of r.
func (c *collector) reportForeignOwner(all sources, s source, obj api.Object, o source, r metav1.OwnerReference) {
	if !o.kind.Namespaced || o.informer == nil || !all.isElsewhere(o, obj.GetNamespace(), r) {
		return
	}
	at := foreignOwner{obj.GetUID(), r.UID}
	c.mu.Lock()
	if len(c.reported) >= maxAbsent {
		clear(c.reported)
	}
	known := c.reported[at]
	c.reported[at] = true
	c.mu.Unlock()
	if known {
		return
	}
	apiVersion, kind := s.kind.GVK.ToAPIVersionAndKind()
	of := &corev1.ObjectReference{APIVersion: apiVersion, Kind: kind, Namespace: obj.GetNamespace(),
		Name: obj.GetName(),
		UID:  obj.GetUID()}
	c.term.Events.Eventf(of, corev1.EventTypeWarning, "OwnerRefInvalidNamespace",
		"ownerRef [%s/%s, namespace: %s, name: %s, uid: %s] does not exist in namespace %q",
		r.APIVersion, r.Kind, obj.GetNamespace(), r.Name, r.UID, obj.GetNamespace())
}

// isElsewhere reports whether the cache of kind o has the object that r names in another namespace.
func (all sources) isElsewhere(o source, namespace string, r metav1.OwnerReference) bool {
	namespaces := all["namespaces"].informer
	if namespaces == nil {
		return false
	}
	for _, ns := range engine.CachedAll[api.Object](namespaces) {
		if ns.GetName() == namespace {
			continue
		}
		if _, ok := o.cachedOwner(ns.GetName(), r); ok {
			return true
		}
	}
	return false
}
