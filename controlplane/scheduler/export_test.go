package scheduler

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// AdoptLate takes in lists that were made a while ago.
func (s *Scheduler) AdoptLate(nodes []*v1.Node, pods []*v1.Pod) {
	s.changes.syncNodes(nodes)
	s.changes.syncPods(context.Background(), pods)
}

// Knows says what of it the scheduler holds.
func (s *Scheduler) Knows(node string, pod types.UID) (knowsNode, placed, queued bool) {
	s.cluster.mu.Lock()
	n := s.cluster.nodes[node]
	s.cluster.mu.Unlock()
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return n != nil && n.Node != nil, s.cluster.isPlaced(pod), s.queue.pods[pod] != nil
}

// NodeVersion is the resource version at which the scheduler knows a node.
func (s *Scheduler) NodeVersion(name string) string {
	s.cluster.mu.Lock()
	defer s.cluster.mu.Unlock()
	if n := s.cluster.nodes[name]; n != nil && n.Node != nil {
		return n.Node.ResourceVersion
	}
	return ""
}

// Requeue queues a pod as if it had just been made.
func (s *Scheduler) Requeue(pod *v1.Pod) { s.queue.addOrUpdate(context.Background(), pod) }

// Group says what is known of a PodGroup.
func (s *Scheduler) Group(namespace, name string) framework.Group {
	return s.lookUpGroup(framework.GroupKey{Namespace: namespace, Name: name})
}

// Attempts is how often the pod was tried.
func (s *Scheduler) Attempts(pod types.UID) int {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	if p := s.queue.pods[pod]; p != nil {
		return p.Attempts
	}
	return 0
}
