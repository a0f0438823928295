package live

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// Service finds a Service, or nil.
func (o *Objects) Service(namespace, name string) *corev1.Service {
	return get[*corev1.Service](o.by["services"], namespace+"/"+name)
}

// Slices are the EndpointSlices of a Service.
func (o *Objects) Slices(namespace, service string) (out []*discoveryv1.EndpointSlice) {
	found, _ := o.by["endpointslices"].GetIndexer().ByIndex(bySlice, namespace+"/"+service)
	for _, s := range found {
		out = append(out, s.(*discoveryv1.EndpointSlice))
	}
	return out
}

// Secret is the Secret whose key pair the control plane has given this proxy, nil where it has not.
func (o *Objects) Secret(namespace, name string) *corev1.Secret {
	return o.files.secret(namespace, name)
}

func list[T any](i cache.SharedIndexInformer) (out []T) {
	if i == nil {
		return nil
	}
	for _, o := range i.GetStore().List() {
		if t, ok := o.(T); ok {
			out = append(out, t)
		}
	}
	return out
}

func get[T any](i cache.SharedIndexInformer, key string) (out T) {
	if o, ok, _ := i.GetStore().GetByKey(key); ok {
		out, _ = o.(T)
	}
	return out
}
