package admission

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
)

// defaultTolerationSeconds returns a plugin that adds tolerations of the taints not-ready and
// unreachable, limited to stay, to pods without them. It also restores them when an update from the
// pod's manifest omits them.
func defaultTolerationSeconds(stay time.Duration) func(context.Context, *api.Attempt) error {
	return func(_ context.Context, a *api.Attempt) error {
		if a.Is("pods") && (a.Creates() || a.Updates()) {
			tolerateLostNodes(a.Whole.(*corev1.Pod), stay)
		}
		return nil
	}
}

func tolerateLostNodes(pod *corev1.Pod, stay time.Duration) {
	for _, key := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		if toleratesExecute(pod, key) {
			continue
		}
		seconds := int64(stay / time.Second)
		pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{
			Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &seconds,
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

// The two PriorityClasses that exist even before they are stored.
const (
	systemClusterCritical, clusterCriticalValue = "system-cluster-critical", 2000000000
	systemNodeCritical, nodeCriticalValue       = "system-node-critical", 2000001000
)

// priority returns a plugin that sets the priority of a pod or PodGroup from its PriorityClass.
func priority(c Cluster) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if g, ok := a.Whole.(*schedulingv1beta1.PodGroup); ok {
			return groupPriority(ctx, c, a, g)
		}
		if a.Is("pods") && a.Updates() {
			keepPriority(a.Whole.(*corev1.Pod), a.Stored.(*corev1.Pod))
		}
		if !a.Is("pods") || !a.Creates() {
			return nil
		}
		pod := a.Whole.(*corev1.Pod)
		value, policy, err := classOf(ctx, c, &pod.Spec.PriorityClassName)
		if err != nil {
			return forbid(a, pod, err)
		}
		if pod.Spec.Priority != nil && *pod.Spec.Priority != value {
			return forbid(a, pod, fmt.Errorf("the integer value of priority (%d) must not be provided in pod spec; priority admission controller computed %d from the given PriorityClass name", *pod.Spec.Priority, value))
		}
		pod.Spec.Priority = &value
		if pod.Spec.PreemptionPolicy != nil && *pod.Spec.PreemptionPolicy != policy {
			return forbid(a, pod, fmt.Errorf("the string value of PreemptionPolicy (%s) must not be provided in pod spec; priority admission controller computed %s from the given PriorityClass name", *pod.Spec.PreemptionPolicy, policy))
		}
		pod.Spec.PreemptionPolicy = &policy
		return nil
	}
}

// keepPriority restores the priority and preemption policy that an update from the pod's manifest
// omits.
func keepPriority(pod, was *corev1.Pod) {
	if pod.Spec.Priority == nil && was.Spec.Priority != nil {
		value := *was.Spec.Priority
		pod.Spec.Priority = &value
	}
	if pod.Spec.PreemptionPolicy == nil && was.Spec.PreemptionPolicy != nil {
		policy := *was.Spec.PreemptionPolicy
		pod.Spec.PreemptionPolicy = &policy
	}
}

// oneDefaultPriority returns a plugin that rejects a second PriorityClass with globalDefault.
// Concurrent writes may still create two; then the lower value applies.
func oneDefaultPriority(c Cluster) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		class, ok := a.Whole.(*schedulingv1.PriorityClass)
		if !ok || !a.Creates() && !a.Updates() || !class.GlobalDefault {
			return nil
		}
		def, err := defaultPriority(ctx, c)
		if err != nil {
			return asStatus(err)
		}
		if def != nil && def.Name != class.Name {
			return forbid(a, class, fmt.Errorf("PriorityClass %s is already marked as default. Only one default can exist", def.Name))
		}
		return nil
	}
}

// defaultPriority returns the PriorityClass of pods without a class; nil if no class is the
// default.
func defaultPriority(ctx context.Context, c Cluster) (*schedulingv1.PriorityClass, error) {
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

// classOf returns the value and preemption policy of the named PriorityClass. If *named is empty,
// it uses the default class and stores its name there.
func classOf(ctx context.Context, c Cluster, named *string) (int32, corev1.PreemptionPolicy, error) {
	name := *named
	if name == "" {
		def, err := defaultPriority(ctx, c)
		if err != nil {
			return 0, "", err
		}
		if def == nil {
			return 0, corev1.PreemptLowerPriority, nil
		}
		*named = def.Name
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
		return &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, Description: why, PreemptionPolicy: &policy}
	}
	return []api.Object{
		class(systemClusterCritical, clusterCriticalValue, "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary."),
		class(systemNodeCritical, nodeCriticalValue, "Used for system critical pods that must not be moved from their current node."),
	}
}

// bindByWrite returns a plugin that binds a pod when an update sets spec.nodeName. It requires the
// permission to create pods/binding. Validation allows the change only for an unbound pod.
func bindByWrite(c Config) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if !a.Is("pods") || !a.Updates() {
			return nil
		}
		pod, before := a.Whole.(*corev1.Pod), a.Stored.(*corev1.Pod)
		if pod.Spec.NodeName == before.Spec.NodeName || pod.Spec.NodeName == "" || before.Spec.NodeName != "" {
			return nil // validation rejects a change to another node
		}
		if !c.Authorized(ctx, a.User, api.VerbCreate, "pods", "binding", a.Namespace, a.Name) {
			return forbid(a, pod, errors.New("spec.nodeName may be set by those only who may create pods/binding"))
		}
		return c.Bind(a, before)
	}
}
