package live

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// Service returns a cached Service, or nil.
func (o *Objects) Service(namespace, name string) *corev1.Service {
	return getObject[*corev1.Service](o.informers["services"], namespace+"/"+name)
}

// Slices returns the cached EndpointSlices of a Service.
func (o *Objects) Slices(namespace, service string) (out []*discoveryv1.EndpointSlice) {
	found, _ := o.informers["endpointslices"].GetIndexer().ByIndex(serviceIndex, namespace+"/"+service)
	for _, s := range found {
		out = append(out, s.(*discoveryv1.EndpointSlice))
	}
	return out
}

// Secret returns the key pair of a Secret in the form of that Secret. It returns nil unless the
// control plane has provided the key pair to this proxy.
func (o *Objects) Secret(namespace, name string) *corev1.Secret {
	return o.files.cachedSecret(namespace, name)
}

func listObjects[T any](i cache.SharedIndexInformer) (out []T) {
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

func getObject[T any](i cache.SharedIndexInformer, key string) (out T) {
	if o, ok, _ := i.GetStore().GetByKey(key); ok {
		out, _ = o.(T)
	}
	return out
}
