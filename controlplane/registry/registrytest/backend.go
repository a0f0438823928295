// Package registrytest provides an api.Backend on a registry without an API server, for tests.
package registrytest

import (
	"context"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
	"keelson.dev/keelson/controlplane/registry"
)

// NewBackend returns a Backend that authorizes every request and admits objects by the defaulting
// and validation of their kind. It is for tests of code that uses api.Backend.
func NewBackend(r *registry.Registry) api.Backend { return backend{r} }

type backend struct{ registry *registry.Registry }

// Do implements api.Backend.
func (b backend) Do(ctx context.Context, req *api.Request) (runtime.Object, error) {
	admit := registry.Stages{Validating: kindstest.ValidateAttempt}
	switch req.Verb {
	case api.VerbGet:
		obj, err := b.registry.GetObject(ctx, req)
		if err != nil {
			return nil, err
		}
		if sub := req.Kind.Subresources[req.Subresource]; sub != nil && sub.View != nil {
			return sub.View(obj), nil
		}
		return obj, nil
	case api.VerbList:
		return b.registry.List(ctx, req)
	case api.VerbCreate:
		return b.createObject(ctx, req, admit)
	case api.VerbUpdate:
		obj, _, err := b.registry.Update(ctx, req, admit)
		return obj, err
	case api.VerbPatch:
		obj, _, err := b.registry.Patch(ctx, req, admit)
		return obj, err
	case api.VerbDelete:
		obj, _, err := b.registry.Delete(ctx, req, admit)
		return obj, err
	case api.VerbDeleteCollection:
		return b.registry.DeleteCollection(ctx, req, admit)
	}
	return nil, apierrors.NewMethodNotSupported(req.Kind.GroupResource(), string(req.Verb))
}

// Watch implements api.Backend.
func (b backend) Watch(ctx context.Context, req *api.Request) (watch.Interface, error) {
	return b.registry.Watch(ctx, req)
}

// createObject stores an object, or performs the subresources binding and eviction, which the
// scheduler and the controllers use.
func (b backend) createObject(ctx context.Context, req *api.Request, admit registry.Admission) (runtime.Object, error) {
	switch body := req.Object.(type) {
	case *corev1.Binding:
		bind := *req
		bind.Object = nil
		_, err := b.registry.Modify(ctx, &bind, nil, func(obj api.Object) error { return bindPod(obj, body) })
		return &metav1.Status{Status: metav1.StatusSuccess, Code: http.StatusCreated}, err
	case *policyv1.Eviction:
		evict := *req
		evict.Object, evict.Verb, evict.Subresource = nil, api.VerbDelete, ""
		if body.DeleteOptions != nil {
			evict.Delete = *body.DeleteOptions
		}
		_, _, err := b.registry.Delete(ctx, &evict, admit)
		return &metav1.Status{Status: metav1.StatusSuccess, Code: http.StatusCreated}, err
	}
	if req.Subresource != "" {
		return nil, apierrors.NewMethodNotSupported(req.Kind.GroupResource(), req.Subresource)
	}
	return b.registry.Create(ctx, req, admit)
}

func bindPod(obj api.Object, binding *corev1.Binding) error {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return apierrors.NewBadRequest("only pods are bound")
	}
	if pod.Spec.NodeName != "" {
		return apierrors.NewConflict(corev1.Resource("pods/binding"), pod.Name,
			fmt.Errorf("pod %s is already assigned to node %q", pod.Name, pod.Spec.NodeName))
	}
	pod.Spec.NodeName, pod.Status.NominatedNodeName = binding.Target.Name, ""
	for k, v := range binding.Annotations {
		metav1.SetMetaDataAnnotation(&pod.ObjectMeta, k, v)
	}
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodScheduled {
			*c = corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue,
				LastTransitionTime: metav1.Now()}
			return nil
		}
	}
	pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{
		Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()})
	return nil
}
