package subresource

import (
	"context"
	"fmt"
	"maps"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry"
)

// Bind performs a create of pods/binding: it sets the node of a pod. If several requests bind the
// same pod, one of them succeeds and the others get a 409.
func (v *Verbs) Bind(ctx context.Context, r *api.Request, a registry.Admission) (runtime.Object, error) {
	b, ok := r.Object.(*corev1.Binding)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a Binding object: %T", r.Object))
	}
	if b.Name != r.Name {
		return nil, apierrors.NewBadRequest("name in URL does not match name in Binding object")
	}
	_, err := v.Registry.ModifyBy(ctx, r, a, b, func(o api.Object, body runtime.Object) error {
		pod, b := o.(*corev1.Pod), body.(*corev1.Binding)
		if errs := validBinding(b); len(errs) > 0 {
			return plainError(errs)
		}
		if b.UID != "" && b.UID != pod.UID {
			return newPreconditionConflict(r, pod,
				fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", b.UID, pod.UID))
		}
		if b.ResourceVersion != "" && b.ResourceVersion != pod.ResourceVersion {
			return newPreconditionConflict(r, pod,
				fmt.Errorf("Precondition failed: ResourceVersion in precondition: %v, ResourceVersion in object "+
					"meta: %v", b.ResourceVersion, pod.ResourceVersion))
		}
		if err := canBind(r, pod); err != nil {
			return err
		}
		pod.Spec.NodeName = b.Target.Name
		if len(b.Annotations) > 0 {
			all := maps.Clone(pod.Annotations)
			if all == nil {
				all = map[string]string{}
			}
			maps.Copy(all, b.Annotations)
			pod.Annotations = all
		}
		markScheduled(pod, metav1.NewTime(v.Clock()))
		return nil
	})
	if apierrors.IsNotFound(err) { // an invalid Binding is rejected before the pod is read
		if errs := validBinding(b); len(errs) > 0 {
			err = plainError(errs)
		}
	}
	if err != nil {
		return nil, err
	}
	return successStatus(), nil
}

// bindNamed performs a create of bindings. It has the effect of a create of pods/binding for the
// pod that the body names. Admission has already run for the resource bindings, and runs again for
// pods/binding.
func (v *Verbs) bindNamed(ctx context.Context, r *api.Request, a registry.Admission, b *corev1.Binding) (
	runtime.Object, error,
) {
	switch {
	case b.Name == "":
		return nil, apierrors.NewBadRequest("Name parameter required.")
	case b.Namespace != "" && b.Namespace != r.Namespace:
		return nil,
			apierrors.NewBadRequest("the namespace of the provided object does not match the namespace " +
				"sent on the request")
	}
	of := *r
	of.Kind, of.Subresource, of.Name, of.Object = v.Kinds.ByResource(podsGVR), "binding", b.Name, b.DeepCopy()
	return v.Bind(ctx, &of, a)
}

// BindByWrite adds to an update that sets spec.nodeName everything that a Binding would change. old
// is the stored pod. It returns a conflict if old cannot be bound.
func (v *Verbs) BindByWrite(a *api.Attempt, old *corev1.Pod) error {
	if err := canBind(a.Request, old); err != nil {
		return err
	}
	a.DeriveFields(func(pod api.Object) { markScheduled(pod.(*corev1.Pod), metav1.NewTime(v.Clock())) })
	return nil
}

func validBinding(b *corev1.Binding) field.ErrorList {
	var errs field.ErrorList
	target := field.NewPath("target")
	if k := b.Target.Kind; k != "" && k != "Node" {
		errs = append(errs, field.NotSupported(target.Child("kind"), k, []string{"Node", "<empty>"}))
	}
	switch k := b.Target.Kind; {
	case b.Target.Name == "":
		errs = append(errs, field.Required(target.Child("name"), ""))
	case k == "" || k == "Node":
		for _, why := range validation.NameIsDNSSubdomain(b.Target.Name, false) {
			errs = append(errs, field.Invalid(target.Child("name"), b.Target.Name, why))
		}
	}
	return errs
}

// plainError returns the same response to an invalid Binding as kube-apiserver: status 500 without
// a reason, because the storage of Bindings returns a plain error there.
func plainError(errs field.ErrorList) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Message: errs.ToAggregate().Error(),
	}}
}

// canBind returns a conflict if the pod cannot be bound: it is being deleted, already bound, or has
// scheduling gates.
func canBind(r *api.Request, pod *corev1.Pod) error {
	switch {
	case pod.DeletionTimestamp != nil:
		return newConflict(r, pod, fmt.Errorf("pod %s is being deleted, cannot be assigned to a host", pod.Name))
	case pod.Spec.NodeName != "":
		return newConflict(r, pod, fmt.Errorf("pod %s is already assigned to node %q", pod.Name, pod.Spec.NodeName))
	case len(pod.Spec.SchedulingGates) > 0:
		return newConflict(r, pod, fmt.Errorf("pod %s has non-empty .spec.schedulingGates", pod.Name))
	}
	return nil
}

// newPreconditionConflict returns the same conflict as kube-apiserver for a pod that does not match
// the UID or the resource version in a Binding. It names the resource pods, not pods/binding.
func newPreconditionConflict(r *api.Request, pod *corev1.Pod, cause error) error {
	return apierrors.NewConflict(r.Kind.GroupResource(), pod.Name, cause)
}

func newConflict(r *api.Request, pod *corev1.Pod, err error) error {
	gr := r.Kind.GroupResource()
	gr.Resource += "/binding"
	return apierrors.NewConflict(gr, pod.Name, err)
}

// markScheduled sets the condition PodScheduled to True and clears status.nominatedNodeName.
func markScheduled(pod *corev1.Pod, timestamp metav1.Time) {
	pod.Status.NominatedNodeName = ""
	c := corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: timestamp,
		ObservedGeneration: pod.Generation}
	for i := range pod.Status.Conditions {
		if pod.Status.Conditions[i].Type != corev1.PodScheduled {
			continue
		}
		if pod.Status.Conditions[i].Status == corev1.ConditionTrue {
			c.LastTransitionTime = pod.Status.Conditions[i].LastTransitionTime
		}
		pod.Status.Conditions[i] = c
		return
	}
	pod.Status.Conditions = append(pod.Status.Conditions, c)
}
