package nodegateway

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/client"
)

// An agent says once that a pod is ready. The pods of a node that is lost, or not ready, are marked as not ready by another
// (controllers/nodelifecycle), which may see the node's return later than the agent's word was stored, or have written
// when the word was compared with what this replica had seen. The session therefore remembers the word and writes it
// again where it sees it contradicted: the agent would not, and the pod would stay out of its Services for ever.

// says remembers what the node says of a pod's readiness, before it is compared with anything that is stored.
func (x *session) says(uid types.UID, s *v1.PodStatus) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if c := readyCondition(s); c != nil && !terminal(s.Phase) {
		x.said[uid] = c.Status
	} else {
		delete(x.said, uid)
	}
}

// uphold looks whether the pods among the keys are as ready as the node says. As long as the node is not ready its pods are
// left as they are marked. It does not block.
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

// contradicts says whether a pod is stored as ready, or not, against the node's word. What is older than this session's own
// write is no contradiction.
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

// writeReady stores the node's word on a pod's readiness, unless the node has ceased to be ready since.
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

// serves says whether the node is seen as ready.
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
