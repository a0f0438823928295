package subresource

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/policy"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/internal/retry"
)

var (
	podsGVR    = corev1.SchemeGroupVersion.WithResource("pods")
	budgetsGVR = policyv1.SchemeGroupVersion.WithResource("poddisruptionbudgets")
)

// Evict performs a create of pods/eviction. It deletes the pod, or returns a 429 if this violates
// the pod's PodDisruptionBudget. Admission checks the Eviction, not the deletion.
func (v *Verbs) Evict(ctx context.Context, r *api.Request, a registry.Admission) (runtime.Object, error) {
	e, ok := r.Object.(*policyv1.Eviction)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not an Eviction object: %T", r.Object))
	}
	if e.Name != r.Name {
		return nil, apierrors.NewBadRequest("name in URL does not match name in Eviction object")
	}
	o, err := v.getStored(ctx, podsGVR, r.Namespace, r.Name)
	if err != nil {
		return nil, err
	}
	pod := o.(*corev1.Pod)
	t, err := admittedAttempt(ctx, r, a, e, pod)
	if err != nil {
		return nil, err
	}
	e = t.Object.(*policyv1.Eviction)
	opts := deletionBy(e, r, pod)
	err = retry.OnConflict(evictionTries, func() (again bool, err error) {
		if again, err = v.tryEvict(ctx, r, t, *opts.DeepCopy(), pod); !again {
			return false, err
		}
		if o, err = v.getStored(ctx, podsGVR, r.Namespace, r.Name); err != nil {
			return false, err
		}
		pod = o.(*corev1.Pod)
		return true, apierrors.NewConflict(podsGVR.GroupResource(), r.Name,
			errors.New("the pod changed during each attempt to evict it; try again"))
	})
	if err != nil {
		return nil, err
	}
	return successStatus(), nil
}

// evictionTries is how often an eviction is tried at most, because the pod was changed meanwhile.
const evictionTries = 10

// tryEvict checks the budget for the given version of the pod and deletes the pod. again is true if
// the pod was changed meanwhile so that another check is required.
func (v *Verbs) tryEvict(
	ctx context.Context, r *api.Request, t *api.Attempt, opts metav1.DeleteOptions, pod *corev1.Pod,
) (again bool, err error) {
	del := *r
	del.Verb, del.Subresource, del.Object, del.Delete = api.VerbDelete, "", nil, opts
	// A deletion that would be refused must not use up a disruption of the budget.
	if err := registry.CheckDelete(&del, pod); err != nil {
		return false, err
	}
	dryRun := len(del.Delete.DryRun) > 0
	guarded := false
	if !isFinished(pod) {
		free, err := v.spendDisruption(ctx, pod, dryRun)
		if err != nil {
			return false, err
		}
		// A pod that needs no disruption because it is not ready may become ready. The precondition
		// deletes only the checked version.
		if guarded = free && del.Delete.Preconditions.ResourceVersion == nil; guarded {
			version := pod.ResourceVersion
			del.Delete.Preconditions.ResourceVersion = &version
		}
	}
	if !dryRun {
		err = v.markEvicted(ctx, &del)
	}
	if err == nil {
		_, _, err = v.Registry.Delete(ctx, &del, v.withAttempt(t))
	}
	return guarded && apierrors.IsConflict(err), err
}

// deletionBy returns the options for the deletion of an evicted pod. If the Eviction has no UID
// precondition, the deletion still requires the UID of the checked pod.
func deletionBy(e *policyv1.Eviction, r *api.Request, pod *corev1.Pod) metav1.DeleteOptions {
	opts := metav1.DeleteOptions{}
	if e.DeleteOptions != nil {
		opts = *e.DeleteOptions.DeepCopy()
	}
	opts.DryRun = append(opts.DryRun, r.Create.DryRun...)
	if opts.Preconditions == nil {
		opts.Preconditions = &metav1.Preconditions{}
	}
	if opts.Preconditions.UID == nil {
		uid := pod.UID
		opts.Preconditions.UID = &uid
	}
	return opts
}

// markEvicted sets the DisruptionTarget condition of the pod. Controllers use it, for example for
// the pod failure policy of a Job. If del has a resourceVersion precondition, it is updated to the
// new version of the pod.
func (v *Verbs) markEvicted(ctx context.Context, del *api.Request) error {
	req := &api.Request{
		User: api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters}}, Verb: api.VerbUpdate,
		Kind: v.Kinds.ByResource(podsGVR), Subresource: "status", Namespace: del.Namespace, Name: del.Name,
	}
	marked, err := v.Registry.Modify(ctx, req, nil, func(o api.Object) error {
		if err := registry.CheckDelete(del, o); err != nil {
			return err
		}
		s := &o.(*corev1.Pod).Status
		c := corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
			Reason:  "EvictionByEvictionAPI",
			Message: "Eviction API: evicting", LastTransitionTime: metav1.NewTime(v.Clock()),
			ObservedGeneration: o.GetGeneration()}
		at := slices.IndexFunc(s.Conditions, func(was corev1.PodCondition) bool { return was.Type == c.Type })
		if at < 0 {
			s.Conditions = append(s.Conditions, c)
			return nil
		}
		if s.Conditions[at].Status == c.Status {
			c.LastTransitionTime = s.Conditions[at].LastTransitionTime
		}
		s.Conditions[at] = c
		return nil
	})
	if err != nil {
		return err
	}
	if p := del.Delete.Preconditions; p.ResourceVersion != nil {
		version := marked.GetResourceVersion()
		p.ResourceVersion = &version
	}
	return nil
}

// isFinished reports whether the pod has terminated or is being deleted. The eviction of such a pod
// does not need the budget.
func isFinished(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp != nil || api.IsPodTerminal(pod)
}

// spendDisruption uses up one of the disruptions that the pod's budget allows. It returns free =
// true if the pod in its current state needs none. It commits the disruption to the budget's
// status, so that concurrent evictions cannot use the same disruption.
func (v *Verbs) spendDisruption(ctx context.Context, pod *corev1.Pod, dryRun bool) (free bool, err error) {
	if pod.Status.Phase == corev1.PodPending {
		return true, nil
	}
	pdb, err := v.budgetOf(ctx, pod)
	if pdb == nil || err != nil {
		return false, err
	}
	if unhealthyIsFree(pdb, pod) {
		return true, nil
	}
	if dryRun {
		_, err := v.checkBudget(ctx, pdb, pod)
		return false, err
	}
	req := &api.Request{
		User: api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters}}, Verb: api.VerbUpdate,
		Kind: v.Kinds.ByResource(budgetsGVR), Subresource: "status", Namespace: pdb.Namespace, Name: pdb.Name,
	}
	_, err = v.Registry.Modify(ctx, req, nil, func(o api.Object) error {
		now := o.(*policyv1.PodDisruptionBudget)
		status, err := v.checkBudget(ctx, now, pod)
		if err == nil {
			now.Status = *status
		}
		return err
	})
	return false, err
}

// disruptionTimeout is how long an evicted pod counts as disrupted if it is not deleted afterwards.
const disruptionTimeout = 2 * time.Minute

// checkBudget returns the budget's status after an eviction of the pod, or a 429 if the budget does
// not allow the eviction. It reads the pods after the budget. Therefore a pod of a concurrent
// eviction is either in the budget's disrupted pods or no longer healthy.
func (v *Verbs) checkBudget(ctx context.Context, pdb *policyv1.PodDisruptionBudget, pod *corev1.Pod) (
	*policyv1.PodDisruptionBudgetStatus, error,
) {
	healthy, expected, unknown, err := v.countPods(ctx, pdb)
	if err != nil {
		return nil, err
	}
	if unknown != nil {
		return nil,
			newViolation("The disruption budget %s does not allow evicting pods currently because it failed sync: %v",
				pdb.Name, unknown)
	}
	desired, err := policy.DesiredHealthy(pdb, expected)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("reading PodDisruptionBudget %s/%s: %w", pdb.Namespace,
			pdb.Name, err))
	}
	going := map[string]metav1.Time{}
	for name, at := range pdb.Status.DisruptedPods {
		if name != pod.Name && healthy[name] && v.Clock().Sub(at.Time) < disruptionTimeout {
			going[name] = at
		}
	}
	staying := len(healthy) - len(going)
	after := staying
	if healthy[pod.Name] {
		after--
	}
	if after < desired || expected == 0 { // a budget without expected pods allows no eviction
		return nil, newViolation("The disruption budget %s needs %d healthy pods and has %d currently", pdb.Name,
			desired, staying)
	}
	going[pod.Name] = metav1.NewTime(v.Clock())
	out := pdb.Status.DeepCopy()
	out.DisruptedPods = going
	out.CurrentHealthy, out.DesiredHealthy, out.ExpectedPods = int32(after), int32(desired), int32(expected)
	out.DisruptionsAllowed = int32(max(0, after-desired))
	out.ObservedGeneration = pdb.Generation
	return out, nil
}

// newViolation returns a 429 for an eviction that the pod's budget does not allow. cause is the
// format of the message in the status cause, and args are its arguments.
func newViolation(cause string, args ...any) error {
	err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{
		Type:    policyv1.DisruptionBudgetCause,
		Message: fmt.Sprintf(cause, args...),
	})
	return err
}

// budgetOf returns the PodDisruptionBudget that selects the pod; nil if no budget selects the pod.
// More than one budget is an error.
func (v *Verbs) budgetOf(ctx context.Context, pod *corev1.Pod) (*policyv1.PodDisruptionBudget, error) {
	list, err := v.listStored(ctx, budgetsGVR, pod.Namespace)
	if err != nil {
		return nil, err
	}
	var found *policyv1.PodDisruptionBudget
	for _, o := range list {
		pdb := o.(*policyv1.PodDisruptionBudget)
		sel, err := metav1.LabelSelectorAsSelector(pdb.Spec.Selector)
		if err != nil || !sel.Matches(labels.Set(pod.Labels)) {
			continue
		}
		if found != nil {
			return nil,
				&apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure,
					Code: http.StatusInternalServerError,
					Message: "This pod has more than one PodDisruptionBudget, which the eviction subresource " +
						"does not support."}}
		}
		found = pdb
	}
	return found, nil
}

// unhealthyIsFree reports whether the pod is unhealthy and its eviction needs no disruption,
// because the unhealthyPodEvictionPolicy of the budget is AlwaysAllow.
func unhealthyIsFree(pdb *policyv1.PodDisruptionBudget, pod *corev1.Pod) bool {
	return pdb.Spec.UnhealthyPodEvictionPolicy != nil && *pdb.Spec.UnhealthyPodEvictionPolicy == policyv1.AlwaysAllow &&
		!healthyPod(pod)
}

func healthyPod(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && api.IsPodReady(pod)
}

// countPods returns the names of the healthy pods that a budget selects, and the number of expected
// pods. If the number cannot be determined, unknown is the reason.
func (v *Verbs) countPods(ctx context.Context, pdb *policyv1.PodDisruptionBudget) (
	healthy map[string]bool, expected int, unknown, err error) {
	list, err := v.listStored(ctx, podsGVR, pdb.Namespace)
	if err != nil {
		return nil, 0, nil, err
	}
	sel, err := metav1.LabelSelectorAsSelector(pdb.Spec.Selector)
	if err != nil {
		return nil, 0, nil, apierrors.NewInternalError(err)
	}
	healthy = map[string]bool{}
	var selected []*corev1.Pod
	for _, o := range list {
		p := o.(*corev1.Pod)
		if !sel.Matches(labels.Set(p.Labels)) {
			continue
		}
		if healthyPod(p) {
			healthy[p.Name] = true
		}
		selected = append(selected, p)
	}
	expected, _, unknown = policy.ExpectedPods(pdb, selected,
		func(namespace string, c *metav1.OwnerReference) (*policy.PodScale, error) {
			return v.requestedScale(ctx, namespace, c)
		})
	return healthy, expected, unknown, nil
}

// requestedScale returns the number of replicas that a controller specifies; nil if the controller
// does not exist. For a ReplicaSet of a Deployment, it is the number in the Deployment.
func (v *Verbs) requestedScale(ctx context.Context, namespace string, c *metav1.OwnerReference) (
	*policy.PodScale, error,
) {
	k, err := policy.ScaleKind(v.Kinds, c)
	if err != nil {
		return nil, err
	}
	o, err := v.getStored(ctx, k.GVR(), namespace, c.Name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	case o.GetUID() != c.UID:
		return nil, nil
	}
	if set, ok := o.(*appsv1.ReplicaSet); ok {
		if up := metav1.GetControllerOf(set); up != nil && up.Kind == "Deployment" {
			return v.requestedScale(ctx, namespace, up)
		}
	}
	scale, ok := k.Subresources["scale"].View(o).(*autoscalingv1.Scale)
	if !ok {
		return nil, fmt.Errorf("%s does not implement the scale subresource", k.GroupResource())
	}
	return policy.NewPodScale(scale, c), nil
}
