package admission

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// defaultTolerationSeconds lets a pod that says nothing about lost nodes stay so long on one.
func defaultTolerationSeconds(stay time.Duration) func(context.Context, *api.Request, api.Object, api.Object) error {
	return func(_ context.Context, r *api.Request, obj, old api.Object) error {
		if is(r, "pods") && creates(r, obj, old) {
			tolerateLostNodes(obj.(*corev1.Pod), stay)
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

// The two classes that always exist, also before they are stored.
const (
	systemClusterCritical, clusterCriticalValue = "system-cluster-critical", 2000000000
	systemNodeCritical, nodeCriticalValue       = "system-node-critical", 2000001000
)

// priority turns a pod's class into its number.
func priority(c Cluster) func(ctx context.Context, r *api.Request, obj, old api.Object) error {
	return func(ctx context.Context, r *api.Request, obj, old api.Object) error {
		if !is(r, "pods") || !creates(r, obj, old) {
			return nil
		}
		pod := obj.(*corev1.Pod)
		value, policy, err := classOf(ctx, c, pod)
		if err != nil {
			return forbid(r, pod, err)
		}
		if pod.Spec.Priority != nil && *pod.Spec.Priority != value {
			return forbid(r, pod, fmt.Errorf("the integer value of priority (%d) must not be provided in pod spec; priority admission controller computed %d from the given PriorityClass name", *pod.Spec.Priority, value))
		}
		pod.Spec.Priority = &value
		if pod.Spec.PreemptionPolicy != nil && *pod.Spec.PreemptionPolicy != policy {
			return forbid(r, pod, fmt.Errorf("the string value of PreemptionPolicy (%s) must not be provided in pod spec; priority admission controller computed %s from the given PriorityClass name", *pod.Spec.PreemptionPolicy, policy))
		}
		pod.Spec.PreemptionPolicy = &policy
		return nil
	}
}

// classOf resolves the class that the pod names, or the cluster's default one, and writes its name into the pod.
func classOf(ctx context.Context, c Cluster, pod *corev1.Pod) (int32, corev1.PreemptionPolicy, error) {
	name := pod.Spec.PriorityClassName
	if name == "" {
		classes, err := c.List(ctx, "priorityclasses", "", false)
		if err != nil {
			return 0, "", err
		}
		var def *schedulingv1.PriorityClass
		for _, o := range classes {
			if pc := o.(*schedulingv1.PriorityClass); pc.GlobalDefault && (def == nil || pc.Value < def.Value) {
				def = pc
			}
		}
		if def == nil {
			return 0, corev1.PreemptLowerPriority, nil
		}
		pod.Spec.PriorityClassName = def.Name
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

// SystemPriorityClasses are stored at the start of every cluster.
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

// bindByWrite lets those who may bind pods do so by writing spec.nodeName as well
// (the kind allows it once).
func bindByWrite(c Config) func(ctx context.Context, r *api.Request, obj, old api.Object) error {
	return func(ctx context.Context, r *api.Request, obj, old api.Object) error {
		if !is(r, "pods") || r.Subresource != "" || obj == nil || old == nil {
			return nil
		}
		pod, before := obj.(*corev1.Pod), old.(*corev1.Pod)
		if pod.Spec.NodeName == before.Spec.NodeName || pod.Spec.NodeName == "" || before.Spec.NodeName != "" {
			return nil // another node is what the kind's own rules refuse
		}
		if !c.Authorized(ctx, r.User, api.VerbCreate, "pods", "binding", r.Namespace, r.Name) {
			return forbid(r, pod, errors.New("spec.nodeName may be set by those only who may create pods/binding"))
		}
		return c.Bind(r, pod, before, pod.Spec.NodeName)
	}
}
