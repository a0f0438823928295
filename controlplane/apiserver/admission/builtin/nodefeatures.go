package builtin

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/nodefeatures"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// nodeFeatures returns a plugin that rejects a pod if its node does not declare the features that
// the pod requires. It checks new pods with spec.nodeName, bindings, and updates of pods that have
// a node. While c.RequireNodeFeatures returns an error, it also rejects new pods that require
// features, and updates after which a pod requires more of them.
func nodeFeatures(c Config) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		pod, ok := a.Whole.(*corev1.Pod)
		if !ok || a.Removes || a.Operation != api.Create && a.Operation != api.Update || a.Facet == "status" {
			return nil
		}
		old, _ := a.Stored.(*corev1.Pod)
		if c.RequireNodeFeatures != nil {
			names := nodefeatures.RequiredToRun(&pod.Spec)
			if old != nil && len(names) > 0 {
				stored := nodefeatures.RequiredToRun(&old.Spec)
				names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(stored, name) })
			}
			if len(names) > 0 {
				err := c.RequireNodeFeatures(ctx, "a pod that requires features "+nodefeatures.List(names))
				if err != nil {
					return admission.NewForbidden(a, pod, err)
				}
			}
		}
		subject, required := "pod", []string(nil)
		switch {
		case pod.Spec.NodeName == "":
		case old == nil || old.Spec.NodeName == "":
			required = nodefeatures.RequiredToRun(&pod.Spec)
		default:
			subject, required = "pod update", nodefeatures.RequiredToUpdate(&old.Spec, &pod.Spec)
		}
		if len(required) == 0 {
			return nil
		}
		return checkNodeFeatures(ctx, c.Cluster, a, pod, subject, required)
	}
}

// checkNodeFeatures returns a 403 if the node of a pod does not exist or lacks required features.
// The messages are those of Kubernetes, with a remedy. subject is what requires the features.
func checkNodeFeatures(ctx context.Context, cluster admission.Cluster, a *admission.Attempt, pod *corev1.Pod,
	subject string, required []string) error {
	o, ok := cluster.Get(ctx, "nodes", "", pod.Spec.NodeName)
	if ok && len(nodefeatures.Missing(required, o.(*corev1.Node))) == 0 {
		return nil
	}
	if o, ok = cluster.Newest(ctx, "nodes", "", pod.Spec.NodeName); !ok {
		return admission.NewForbidden(a, pod, fmt.Errorf("node %q not found", pod.Spec.NodeName))
	}
	if missing := nodefeatures.Missing(required, o.(*corev1.Node)); len(missing) > 0 {
		return admission.NewForbidden(a, pod, fmt.Errorf("%s requires features %s which are not available on node %q: "+
			"upgrade the agent of that node", subject, nodefeatures.List(missing), pod.Spec.NodeName))
	}
	return nil
}
