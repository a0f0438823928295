package registry

import (
	"context"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
)

// Direct returns a Backend that authorizes everything and admits by the kind's own defaulting and
// validation. It is the registry without an API server, for tests of code that uses api.Backend.
func Direct(r *Registry) api.Backend { return direct{r} }

type direct struct{ r *Registry }

// Do implements api.Backend.
func (d direct) Do(ctx context.Context, req *api.Request) (runtime.Object, error) {
	admit := Stages{Validating: KindRules}
	switch req.Verb {
	case api.VerbGet:
		obj, err := d.r.Get(ctx, req)
		if err != nil {
			return nil, err
		}
		if sub := req.Kind.Subresources[req.Subresource]; sub != nil && sub.View != nil {
			return sub.View(obj), nil
		}
		return obj, nil
	case api.VerbList:
		return d.r.List(ctx, req)
	case api.VerbCreate:
		return d.create(ctx, req, admit)
	case api.VerbUpdate:
		obj, _, err := d.r.Update(ctx, req, admit)
		return obj, err
	case api.VerbPatch:
		obj, _, err := d.r.Patch(ctx, req, admit)
		return obj, err
	case api.VerbDelete:
		obj, _, err := d.r.Delete(ctx, req, admit)
		return obj, err
	case api.VerbDeleteCollection:
		return d.r.DeleteCollection(ctx, req, admit)
	}
	return nil, apierrors.NewMethodNotSupported(req.Kind.GroupResource(), string(req.Verb))
}

// Watch implements api.Backend.
func (d direct) Watch(ctx context.Context, req *api.Request) (watch.Interface, error) {
	return d.r.Watch(ctx, req)
}

// KindRules validates an attempt by the rules of its kind only.
func KindRules(ctx context.Context, a *api.Attempt) error {
	obj, old := a.Whole, a.Stored
	if obj == nil {
		return nil
	}
	k := a.Kind
	var errs field.ErrorList
	if k.Check != nil {
		errs = k.Check(ctx, a.Facet, obj, old)
	} else {
		errs = k.Judge(obj, old)
	}
	if old != nil && k.Check == nil {
		check := k.ValidateUpdate
		if sub := k.Subresources[a.Facet]; sub != nil && sub.ValidateUpdate != nil {
			check = sub.ValidateUpdate
		}
		if check != nil {
			errs = append(errs, check(obj, old)...)
		}
	}
	refused, _ := k.Answers.Check(obj, old)
	errs = append(errs, refused...)
	if len(errs) > 0 {
		return apierrors.NewInvalid(k.GVK.GroupKind(), obj.GetName(), errs)
	}
	return nil
}

// create stores an object, or performs the subresources binding and eviction, which the scheduler
// and controllers create.
func (d direct) create(ctx context.Context, req *api.Request, admit Admission) (runtime.Object, error) {
	switch body := req.Object.(type) {
	case *corev1.Binding:
		bind := *req
		bind.Object = nil
		_, err := d.r.Modify(ctx, &bind, nil, func(obj api.Object) error { return bindPod(obj, body) })
		return &metav1.Status{Status: metav1.StatusSuccess, Code: http.StatusCreated}, err
	case *policyv1.Eviction:
		evict := *req
		evict.Object, evict.Verb, evict.Subresource = nil, api.VerbDelete, ""
		if body.DeleteOptions != nil {
			evict.Delete = *body.DeleteOptions
		}
		_, _, err := d.r.Delete(ctx, &evict, admit)
		return &metav1.Status{Status: metav1.StatusSuccess, Code: http.StatusCreated}, err
	}
	if req.Subresource != "" {
		return nil, apierrors.NewMethodNotSupported(req.Kind.GroupResource(), req.Subresource)
	}
	return d.r.Create(ctx, req, admit)
}

func bindPod(obj api.Object, b *corev1.Binding) error {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return apierrors.NewBadRequest("only pods are bound")
	}
	if pod.Spec.NodeName != "" {
		return apierrors.NewConflict(corev1.Resource("pods/binding"), pod.Name,
			fmt.Errorf("pod %s is already assigned to node %q", pod.Name, pod.Spec.NodeName))
	}
	pod.Spec.NodeName, pod.Status.NominatedNodeName = b.Target.Name, ""
	for k, v := range b.Annotations {
		metav1.SetMetaDataAnnotation(&pod.ObjectMeta, k, v)
	}
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodScheduled {
			*c = corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}
			return nil
		}
	}
	pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{
		Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()})
	return nil
}
