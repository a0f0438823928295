package engine

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// MaxEvents is the maximum number of pods of one scaling operation for which an Event is recorded.
// The event recorder would drop most further events of the same object, and thousands of events
// cost as much as the pods.
const MaxEvents = 25

// OwnedPods is a View of pods with methods to create and delete the pods of the controller's
// objects, such as ReplicaSets.
type OwnedPods struct {
	*View[*corev1.Pod]
	term *Term
}

// OwnedPodsOf returns the OwnedPods of an informer of pods, which must have ControllerIndex. It may
// be called only by Descriptor.Lead.
func OwnedPodsOf(t *Term, pods cache.SharedIndexInformer) *OwnedPods {
	return &OwnedPods{View: ViewOf[*corev1.Pod](t, pods), term: t}
}

// PodFrom returns a new pod from a template. ref is the reference to its controller, owner. The pod
// has the trace context of owner. The API server completes its name.
func PodFrom(owner api.Object, ref metav1.OwnerReference, template *corev1.PodTemplateSpec) *corev1.Pod {
	t := template.DeepCopy()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       owner.GetNamespace(),
			GenerateName:    owner.GetName() + "-",
			Labels:          t.Labels,
			Annotations:     t.Annotations,
			Finalizers:      t.Finalizers,
			OwnerReferences: []metav1.OwnerReference{ref},
		},
		Spec: t.Spec,
	}
	if len(validation.IsDNS1123Subdomain(p.GenerateName+"x")) > 0 {
		p.GenerateName = owner.GetName() // the API server shortens a prefix of the maximum length
	}
	CopyTrace(p, owner)
	return p
}

// Candidates returns the pods that owner controls, and the pods of its namespace that have no
// controller.
func (o *OwnedPods) Candidates(owner api.Object) []*corev1.Pod {
	return o.By(ControllerIndex, string(owner.GetUID()), OrphansOf(owner.GetNamespace()))
}

// Active returns the pods that are neither terminal nor being deleted.
func (o *OwnedPods) Active(pods []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	for _, p := range pods {
		if !api.IsPodTerminal(p) && !o.IsDeleting(p) {
			out = append(out, p)
		}
	}
	return out
}

// Create creates a pod of owner. The caller must not use pod afterwards; the returned pod is
// shared. If withEvent is true, success is recorded as an Event. A failure is always recorded,
// except when the namespace is being deleted or the term of leadership has ended.
func (o *OwnedPods) Create(
	ctx context.Context, owner api.Object, pod *corev1.Pod, withEvent bool,
) (*corev1.Pod, error) {
	start := o.term.Now()
	made, err := client.CreateGiven(ctx, o.term.Client, pod)
	if err != nil {
		if !IsNamespaceTerminating(err) && ctx.Err() == nil {
			o.term.Events.Eventf(owner, corev1.EventTypeWarning, "FailedCreate", "Error creating: %v", err)
		}
		return nil, fmt.Errorf("creating a pod of %s %s: %w", controllerKind(pod), storeKey(owner), err)
	}
	o.RecordWrite(made)
	o.term.Record("pod created", made, "pod", start, "of "+controllerKind(made)+" "+owner.GetName())
	if withEvent {
		o.term.Events.Eventf(owner, corev1.EventTypeNormal, "SuccessfulCreate", "Created pod: %v", made.Name)
	}
	return made, nil
}

// Delete deletes a pod of owner. It is not an error if the pod does not exist. If withEvent is
// true, success is recorded as an Event.
func (o *OwnedPods) Delete(ctx context.Context, owner api.Object, pod *corev1.Pod, withEvent bool) error {
	o.MarkDeleting(pod)
	err := client.Delete[*corev1.Pod](ctx, o.term.Client, pod.Namespace, pod.Name, DeleteOnlyUID(pod))
	switch {
	case err == nil:
		if withEvent {
			o.term.Events.Eventf(owner, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted pod: %v", pod.Name)
		}
		return nil
	case apierrors.IsNotFound(err):
		return nil // the informer will deliver the deletion
	}
	o.UnmarkDeleting(pod)
	if ctx.Err() == nil && !apierrors.IsConflict(err) {
		o.term.Events.Eventf(owner, corev1.EventTypeWarning, "FailedDelete", "Error deleting: %v", err)
	}
	return fmt.Errorf("deleting pod %s of %s %s: %w", storeKey(pod), controllerKind(pod), storeKey(owner), err)
}

// IsNamespaceTerminating reports whether err means that a write was refused because its namespace
// is being deleted. A controller then needs no further objects in that namespace.
func IsNamespaceTerminating(err error) bool {
	return apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}

// controllerKind returns the lower-case kind of an object's controller for error messages, for
// example "replicaset".
func controllerKind(o metav1.Object) string {
	if ref := metav1.GetControllerOfNoCopy(o); ref != nil {
		return strings.ToLower(ref.Kind)
	}
	return "owner"
}
