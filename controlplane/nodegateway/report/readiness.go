package report

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/retry"
)

// An agent reports a pod's readiness once. The node lifecycle controller marks the pods of a lost
// or unready node as not ready. It may do so after the agent's report was stored, because it
// observes the node's return later.
//
// The session therefore remembers the last report and writes it again if the stored condition
// differs from it. Otherwise the pod would never return to its Services, because the agent does not
// repeat the report.

// recordReadiness remembers the readiness in s, the pod status that the node reports. It is called
// before s is compared with the stored status.
func (r *Reporter) recordReadiness(uid types.UID, s *v1.PodStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := api.FindPodCondition(s.Conditions, v1.PodReady); c != nil && !api.IsTerminalPhase(s.Phase) {
		r.readiness[uid] = c.Status
	} else {
		delete(r.readiness, uid)
	}
}

// RestoreReadiness queues a write for each of the pods whose Ready condition differs from the
// node's last report. It does nothing while the node is not Ready.
func (r *Reporter) RestoreReadiness(pods []types.NamespacedName) {
	if !r.isNodeReady() {
		return
	}
	for _, name := range pods {
		pod, ok := r.cfg.Objects.Pod(name.Namespace, name.Name)
		if !ok || pod.Spec.NodeName != r.node || !r.contradictsReport(pod) {
			continue
		}
		r.QueueWrite("ready/"+string(pod.UID), 0, func(ctx context.Context) error {
			return r.writeReadiness(ctx, pod.Namespace, pod.Name, pod.UID)
		})
	}
}

// contradictsReport reports whether a pod's stored Ready condition differs from the node's last
// report. It returns false for a version of the pod that is older than this session's last write.
func (r *Reporter) contradictsReport(pod *v1.Pod) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	reported, ok := r.readiness[pod.UID]
	if e, wrote := r.ownWrites[pod.UID]; !ok || wrote && wire.RevisionOf(pod) < e.to {
		return false
	}
	c := api.PodCondition(pod, v1.PodReady)
	return c != nil && c.Status != reported && !api.IsPodTerminal(pod)
}

// writeReadiness stores the reported readiness of a pod, unless the node is no longer Ready.
func (r *Reporter) writeReadiness(ctx context.Context, namespace, name string, uid types.UID) error {
	pod, ok := r.newestPod(namespace, name, uid)
	return retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		if !ok {
			if pod, err = r.readPod(ctx, namespace, name, uid); pod == nil {
				return false, err
			}
		}
		if pod.UID != uid || pod.Spec.NodeName != r.node || !r.isNodeReady() || !r.contradictsReport(pod) {
			return false, nil
		}
		next := *pod
		next.Status = *pod.Status.DeepCopy()
		r.mu.Lock()
		reported := r.readiness[uid]
		r.mu.Unlock()
		c := api.PodCondition(&next, v1.PodReady)
		if reported == "" {
			return false, nil
		}
		c.Status, c.LastTransitionTime = reported, metav1.Now()
		stored, err := client.UpdateStatus(ctx, r.api, &next)
		if again, err = r.handleWriteResult("readiness", pod, stored, err); again {
			ok, err = false, fmt.Errorf("fleet: readiness of pod %s/%s: too many conflicts", namespace, name)
		}
		return again, err
	})
}

// isNodeReady reports whether the stored Node is Ready.
func (r *Reporter) isNodeReady() bool {
	n, ok := r.cfg.Objects.Node(r.node)
	return ok && api.IsNodeReady(n)
}
