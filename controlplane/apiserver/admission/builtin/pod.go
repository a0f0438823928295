package builtin

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// defaultTolerationSeconds returns a plugin that adds tolerations of the taints not-ready and
// unreachable to pods without them. Their tolerationSeconds is the given duration. Updates that
// omit the added tolerations, as the pod's manifest does, get them again.
func defaultTolerationSeconds(duration time.Duration) func(context.Context, *api.Attempt) error {
	return func(_ context.Context, a *api.Attempt) error {
		if a.IsCoreResource("pods") && (a.CreatesObject() || a.UpdatesObject()) {
			tolerateLostNodes(a.Whole.(*corev1.Pod), duration)
		}
		return nil
	}
}

func tolerateLostNodes(pod *corev1.Pod, duration time.Duration) {
	for _, key := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		if toleratesExecute(pod, key) {
			continue
		}
		seconds := int64(duration / time.Second)
		pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{
			Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute,
			TolerationSeconds: &seconds,
		})
	}
}

func toleratesExecute(pod *corev1.Pod, key string) bool {
	for _, t := range pod.Spec.Tolerations {
		if (t.Key == key || t.Key == "") && (t.Effect == corev1.TaintEffectNoExecute || t.Effect == "") {
			return true
		}
	}
	return false
}

// Names and values of the two PriorityClasses that can be used even before they are stored.
const (
	systemClusterCritical, clusterCriticalValue = "system-cluster-critical", 2000000000
	systemNodeCritical, nodeCriticalValue       = "system-node-critical", 2000001000
)

// podPriority returns a plugin that sets the priority of a pod or PodGroup from its PriorityClass.
func podPriority(c admission.Cluster) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if g, ok := a.Whole.(*schedulingv1beta1.PodGroup); ok {
			return setGroupPriority(ctx, c, a, g)
		}
		if a.IsCoreResource("pods") && a.UpdatesObject() {
			restorePriority(a.Whole.(*corev1.Pod), a.Stored.(*corev1.Pod))
		}
		if !a.IsCoreResource("pods") || !a.CreatesObject() {
			return nil
		}
		pod := a.Whole.(*corev1.Pod)
		value, policy, err := classPriority(ctx, c, &pod.Spec.PriorityClassName)
		if err != nil {
			return admission.NewForbidden(a, pod, err)
		}
		if pod.Spec.Priority != nil && *pod.Spec.Priority != value {
			return admission.NewForbidden(a, pod,
				fmt.Errorf("the integer value of priority (%d) must not be provided in pod spec; priority admission "+
					"controller computed %d from the given PriorityClass name", *pod.Spec.Priority, value))
		}
		pod.Spec.Priority = &value
		if pod.Spec.PreemptionPolicy != nil && *pod.Spec.PreemptionPolicy != policy {
			return admission.NewForbidden(a, pod,
				fmt.Errorf("the string value of PreemptionPolicy (%s) must not be provided in pod spec; priority "+
					"admission controller computed %s from the given PriorityClass name",
					*pod.Spec.PreemptionPolicy, policy))
		}
		pod.Spec.PreemptionPolicy = &policy
		return nil
	}
}

// restorePriority restores the stored priority and preemption policy if an update omits them, as
// the pod's manifest does.
func restorePriority(pod, old *corev1.Pod) {
	if pod.Spec.Priority == nil && old.Spec.Priority != nil {
		value := *old.Spec.Priority
		pod.Spec.Priority = &value
	}
	if pod.Spec.PreemptionPolicy == nil && old.Spec.PreemptionPolicy != nil {
		policy := *old.Spec.PreemptionPolicy
		pod.Spec.PreemptionPolicy = &policy
	}
}

// oneDefaultPriority returns a plugin that rejects a second PriorityClass with globalDefault.
// Concurrent writes may still create two; then the class with the lower value is the default.
func oneDefaultPriority(c admission.Cluster) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		class, ok := a.Whole.(*schedulingv1.PriorityClass)
		if !ok || !a.CreatesObject() && !a.UpdatesObject() || !class.GlobalDefault {
			return nil
		}
		def, err := defaultPriority(ctx, c)
		if err != nil {
			return admission.AsStatus(err)
		}
		if def != nil && def.Name != class.Name {
			return admission.NewForbidden(a, class,
				fmt.Errorf("PriorityClass %s is already marked as default. Only one default can exist", def.Name))
		}
		return nil
	}
}

// defaultPriority returns the PriorityClass of pods without a class; nil if no class is the
// default.
func defaultPriority(ctx context.Context, c admission.Cluster) (*schedulingv1.PriorityClass, error) {
	classes, err := c.List(ctx, "priorityclasses", "", false)
	if err != nil {
		return nil, err
	}
	var def *schedulingv1.PriorityClass
	for _, o := range classes {
		if pc := o.(*schedulingv1.PriorityClass); pc.GlobalDefault && (def == nil || pc.Value < def.Value) {
			def = pc
		}
	}
	return def, nil
}

// classPriority returns the value and preemption policy of the PriorityClass *class. If *class is
// empty, it uses the default class and sets *class to its name.
func classPriority(ctx context.Context, c admission.Cluster, class *string) (int32, corev1.PreemptionPolicy, error) {
	name := *class
	if name == "" {
		def, err := defaultPriority(ctx, c)
		if err != nil {
			return 0, "", err
		}
		if def == nil {
			return 0, corev1.PreemptLowerPriority, nil
		}
		*class = def.Name
		return def.Value, policyOf(def), nil
	}
	if o, ok := c.Get(ctx, "priorityclasses", "", name); ok {
		pc := o.(*schedulingv1.PriorityClass)
		return pc.Value, policyOf(pc), nil
	}
	switch name {
	case systemClusterCritical:
		return clusterCriticalValue, corev1.PreemptLowerPriority, nil
	case systemNodeCritical:
		return nodeCriticalValue, corev1.PreemptLowerPriority, nil
	}
	return 0, "", fmt.Errorf("no PriorityClass with name %s was found", name)
}

func policyOf(pc *schedulingv1.PriorityClass) corev1.PreemptionPolicy {
	if pc.PreemptionPolicy != nil {
		return *pc.PreemptionPolicy
	}
	return corev1.PreemptLowerPriority
}

// SystemPriorityClasses returns the PriorityClasses that are stored when a cluster is created.
func SystemPriorityClasses() []api.Object {
	class := func(name string, value int32, why string) *schedulingv1.PriorityClass {
		policy := corev1.PreemptLowerPriority
		return &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, Description: why,
			PreemptionPolicy: &policy}
	}
	return []api.Object{
		class(systemClusterCritical, clusterCriticalValue,
			"Used for system critical pods that must run in the cluster, but can be moved to another "+
				"node if necessary."),
		class(systemNodeCritical, nodeCriticalValue,
			"Used for system critical pods that must not be moved from their current node."),
	}
}

// bindByWrite returns a plugin that binds an unbound pod if an update sets its spec.nodeName. The
// user needs the permission to create pods/binding. Validation rejects the change for a bound pod.
func bindByWrite(c Config) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if !a.IsCoreResource("pods") || !a.UpdatesObject() {
			return nil
		}
		pod, before := a.Whole.(*corev1.Pod), a.Stored.(*corev1.Pod)
		if pod.Spec.NodeName == before.Spec.NodeName || pod.Spec.NodeName == "" || before.Spec.NodeName != "" {
			return nil // validation rejects a change to another node
		}
		if !c.Access.Authorized(ctx, a.User, api.VerbCreate, "pods", "binding", a.Namespace, a.Name) {
			return admission.NewForbidden(a, pod,
				errors.New("setting spec.nodeName requires permission to create pods/binding"))
		}
		return c.Bind(a, before)
	}
}
