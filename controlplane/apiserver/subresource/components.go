package subresource

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
)

// readVirtual performs a get or list of a virtual kind. Objects of virtual kinds are not stored but
// computed from current data. The result has no resourceVersion.
func (v *Verbs) readVirtual(ctx context.Context, r *api.Request) (runtime.Object, error) {
	chosen, err := newSelector(r)
	if err != nil {
		return nil, err
	}
	all, err := v.currentObjects(ctx, r)
	if err != nil {
		return nil, err
	}
	var found []api.Object
	for _, o := range all {
		if chosen(o) {
			o.GetObjectKind().SetGroupVersionKind(r.Kind.GVK)
			found = append(found, o)
		}
	}
	switch {
	case r.Verb == api.VerbGet && len(found) == 0:
		return nil, apierrors.NewNotFound(r.Kind.GroupResource(), r.Name)
	case r.Verb == api.VerbGet:
		return found[0], nil
	}
	if !r.Internal.Pointers {
		return r.Kind.Type.Ops.List(found), nil
	}
	list := &api.ObjectList{Items: found}
	list.SetGroupVersionKind(r.Kind.ListGVK())
	for _, o := range found {
		if sized, ok := o.(interface{ Size() int }); ok {
			list.Bytes += int64(sized.Size())
		}
	}
	return list, nil
}

// currentObjects returns all current objects of a virtual kind in the namespace of the request.
func (v *Verbs) currentObjects(ctx context.Context, r *api.Request) ([]api.Object, error) {
	switch r.Kind.Type.New().(type) {
	case *corev1.ComponentStatus:
		var out []api.Object
		if v.Components != nil {
			for _, c := range v.Components(ctx) {
				out = append(out, &c)
			}
		}
		return out, nil
	case *metricsv1beta1.NodeMetrics:
		return v.usageMetrics(ctx, "nodes", r)
	case *metricsv1beta1.PodMetrics:
		return v.usageMetrics(ctx, "pods", r)
	}
	return nil, apierrors.NewMethodNotSupported(r.Kind.GroupResource(), string(r.Verb))
}

// usageMetrics returns the NodeMetrics of Nodes or the PodMetrics of pods. It includes only objects
// that exist, so that clients cannot read metrics of others.
func (v *Verbs) usageMetrics(ctx context.Context, resource string, r *api.Request) ([]api.Object, error) {
	if v.Usage == nil {
		return nil, nil
	}
	gvr := corev1.SchemeGroupVersion.WithResource(resource)
	if r.Verb != api.VerbGet {
		of, err := v.listStored(ctx, gvr, r.Namespace)
		return v.Usage(of), err
	}
	one, err := v.getStored(ctx, gvr, r.Namespace, r.Name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil // the caller then reports that the metrics do not exist
	case err != nil:
		return nil, err
	}
	return v.Usage([]api.Object{one}), nil
}

// newSelector returns a filter for the objects of a get or list: by name, or by the label and field
// selectors.
func newSelector(r *api.Request) (func(api.Object) bool, error) {
	if r.Verb == api.VerbGet {
		return func(o api.Object) bool { return o.GetName() == r.Name }, nil
	}
	byLabel, err := labels.Parse(r.List.LabelSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	byField, err := fields.ParseSelector(r.List.FieldSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	for _, q := range byField.Requirements() {
		if q.Field != "metadata.name" && q.Field != "metadata.namespace" {
			return nil, apierrors.NewBadRequest("field label not supported: " + q.Field)
		}
	}
	return func(o api.Object) bool {
		is := fields.Set{"metadata.name": o.GetName(), "metadata.namespace": o.GetNamespace()}
		return byLabel.Matches(labels.Set(o.GetLabels())) && byField.Matches(is)
	}, nil
}
