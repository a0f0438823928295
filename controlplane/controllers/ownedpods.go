package controllers

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

// MaxEvents is how many pods of one scaling are told about by an Event each. No more would be kept of one object
// anyway, and thousands cost as much as the pods.
const MaxEvents = 25

// OwnedPods is a view of pods through which a controller makes and deletes those of its owners.
type OwnedPods struct {
	*View[*corev1.Pod]
	term *Term
}

// OwnedPodsOf returns the pods of an informer that has ControllerIndex. Call it from Controller.Lead only.
func OwnedPodsOf(t *Term, pods cache.SharedIndexInformer) *OwnedPods {
	return &OwnedPods{View: ViewOf[*corev1.Pod](t, pods), term: t}
}

// PodFrom is a pod of a template: owned by owner, with the trace of the apply that asked for it, its name to be
// completed by the API.
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
		p.GenerateName = owner.GetName() // one character from too long: the API shortens it
	}
	CopyTrace(p, owner)
	return p
}

// Candidates returns the pods that owner controls, and those of its namespace without a controller.
func (o *OwnedPods) Candidates(owner api.Object) []*corev1.Pod {
	return o.By(ControllerIndex, string(owner.GetUID()), OrphansOf(owner.GetNamespace()))
}

// Active are those of pods that count: neither ended nor going.
func (o *OwnedPods) Active(pods []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	for _, p := range pods {
		if !PodEnded(p) && !o.Going(p) {
			out = append(out, p)
		}
	}
	return out
}

// Create makes a pod for owner. The caller gives pod away; the one that is returned is shared. tell says whether an Event
// tells of success; a failure is always told of, but the end of the namespace and of the leadership.
func (o *OwnedPods) Create(ctx context.Context, owner api.Object, pod *corev1.Pod, tell bool) (*corev1.Pod, error) {
	start := o.term.Now()
	made, err := client.CreateGiven(ctx, o.term.Client, pod)
	if err != nil {
		if !NamespaceEnds(err) && ctx.Err() == nil {
			o.term.Events.Eventf(owner, corev1.EventTypeWarning, "FailedCreate", "Error creating: %v", err)
		}
		return nil, fmt.Errorf("creating a pod of %s %s: %w", controllerKind(pod), storeKey(owner), err)
	}
	o.Wrote(made)
	o.term.Record("pod created", made, "pod", start, "of "+controllerKind(made)+" "+owner.GetName())
	if tell {
		o.term.Events.Eventf(owner, corev1.EventTypeNormal, "SuccessfulCreate", "Created pod: %v", made.Name)
	}
	return made, nil
}

// Delete deletes a pod of owner; that it is gone already is no error. tell as with Create.
func (o *OwnedPods) Delete(ctx context.Context, owner api.Object, pod *corev1.Pod, tell bool) error {
	o.Deleting(pod)
	err := client.Delete[*corev1.Pod](ctx, o.term.Client, pod.Namespace, pod.Name, ByUID(pod))
	switch {
	case err == nil:
		if tell {
			o.term.Events.Eventf(owner, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted pod: %v", pod.Name)
		}
		return nil
	case apierrors.IsNotFound(err):
		return nil // gone is what was wanted; the informer will say so
	}
	o.Kept(pod)
	if ctx.Err() == nil && !apierrors.IsConflict(err) {
		o.term.Events.Eventf(owner, corev1.EventTypeWarning, "FailedDelete", "Error deleting: %v", err)
	}
	return fmt.Errorf("deleting pod %s of %s %s: %w", storeKey(pod), controllerKind(pod), storeKey(owner), err)
}

// NamespaceEnds says whether a write was refused because its namespace is being deleted: nothing will be wanted there
// again.
func NamespaceEnds(err error) bool {
	return apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}

// controllerKind is the kind of an object's controller in lower case, for errors: "replicaset".
func controllerKind(o metav1.Object) string {
	if ref := metav1.GetControllerOfNoCopy(o); ref != nil {
		return strings.ToLower(ref.Kind)
	}
	return "owner"
}
