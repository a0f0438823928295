package nodegateway

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/client"
)

// An agent reports a pod's readiness once. The node lifecycle controller marks the pods of a lost
// or unready node as not ready. It may do so after the agent's report was stored, because it sees
// the node's return later.
//
// The session therefore remembers the last report and writes it again if the stored condition
// contradicts it. The agent would not repeat it, and the pod would never return to its Services.

// says records the readiness that the node reports for a pod, before any comparison with the stored
// status.
func (x *session) says(uid types.UID, s *v1.PodStatus) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if c := readyCondition(s); c != nil && !terminal(s.Phase) {
		x.said[uid] = c.Status
	} else {
		delete(x.said, uid)
	}
}

// uphold queues a write for each pod among keys with a Ready condition that differs from the node's
// last report. It does nothing while the node is not Ready. It does not block.
func (x *session) uphold(keys []key) {
	if !x.serves() {
		return
	}
	for _, k := range keys {
		if k.kind != kindPod {
			continue
		}
		p, ok := x.srv.view.pod(k.namespace, k.name)
		if !ok || p.Spec.NodeName != x.node || !x.contradicts(p) {
			continue
		}
		x.put("ready/"+string(p.UID), 0, func(ctx context.Context) error {
			return x.writeReady(ctx, p.Namespace, p.Name, p.UID)
		})
	}
}

// contradicts reports whether a pod's stored Ready condition differs from the node's last report. A
// version of the pod older than this session's own write is ignored.
func (x *session) contradicts(p *v1.Pod) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	said, ok := x.said[p.UID]
	if e, wrote := x.echoes[p.UID]; !ok || wrote && revisionOf(p) < e.to {
		return false
	}
	c := readyCondition(&p.Status)
	return c != nil && c.Status != said && !terminal(p.Status.Phase)
}

// writeReady stores the reported readiness of a pod, unless the node is no longer Ready.
func (x *session) writeReady(ctx context.Context, namespace, name string, uid types.UID) error {
	pod, ok := x.newest(namespace, name, uid)
	for range 5 {
		if !ok {
			var err error
			if pod, err = x.read(ctx, namespace, name, uid); pod == nil {
				return err
			}
		}
		if pod.UID != uid || pod.Spec.NodeName != x.node || !x.serves() || !x.contradicts(pod) {
			return nil
		}
		next := *pod
		next.Status = *pod.Status.DeepCopy()
		x.mu.Lock()
		said := x.said[uid]
		x.mu.Unlock()
		c := readyCondition(&next.Status)
		if said == "" {
			return nil
		}
		c.Status, c.LastTransitionTime = said, metav1.Now()
		stored, err := client.UpdateStatus(ctx, x.api, &next)
		if again, err := x.written("readiness", pod, stored, err); !again {
			return err
		}
		ok = false
	}
	return fmt.Errorf("fleet: readiness of pod %s/%s: too many conflicts", namespace, name)
}

// serves reports whether the stored Node is Ready.
func (x *session) serves() bool {
	n, ok := x.srv.view.nodeObject(x.node)
	return ok && nodeIsReady(n)
}

func readyCondition(s *v1.PodStatus) *v1.PodCondition {
	for i := range s.Conditions {
		if s.Conditions[i].Type == v1.PodReady {
			return &s.Conditions[i]
		}
	}
	return nil
}
