package scheduler

import (
	"maps"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// The queues in the metrics. A gated pod enters the queue queueUnschedulable, as in kube-scheduler,
// but is counted as pending in queueGated.
const (
	queueActive = iota
	queueBackoff
	queueUnschedulable
	queueGated
	numQueues
)

var queueNames = [numQueues]string{"active", "backoff", "unschedulable", "gated"}

// Causes of an entry into a queue other than a framework.Event, as in kube-scheduler.
const (
	causePodAdded    = "UnscheduledPodAdd"
	causePodUpdated  = "UnscheduledPodUpdate"
	causeFailure     = "ScheduleAttemptFailure"
	causeBackoffOver = "BackoffComplete"
	causeOverdue     = "UnschedulableTimeout"
	causeActivated   = "ForceActivate"
)

// eventLabels contains the name of each framework.Event in the metrics of kube-scheduler. Where
// kube-scheduler distinguishes additions and updates and the framework does not, it is an update.
var eventLabels = map[framework.Event]string{
	framework.NodeAdded:          "NodeAdd",
	framework.NodeAllocatable:    "NodeUpdateNodeAllocatable",
	framework.NodeLabels:         "NodeUpdateNodeLabel",
	framework.NodeTaints:         "NodeUpdateNodeTaint",
	framework.PodRemoved:         "AssignedPodDelete",
	framework.PodAdded:           "AssignedPodAdd",
	framework.PodUpdated:         "AssignedPodUpdate",
	framework.NamespaceLabels:    "NamespaceUpdate",
	framework.ClaimChanged:       "PersistentVolumeClaimUpdate",
	framework.VolumeChanged:      "PersistentVolumeUpdate",
	framework.StorageClassChange: "storage.k8s.io/StorageClassUpdate",
	framework.DriversChanged:     "storage.k8s.io/CSINodeUpdate",
	framework.DeviceClaimChanged: "resource.k8s.io/ResourceClaimUpdate",
	framework.SliceChanged:       "resource.k8s.io/ResourceSliceUpdate",
	framework.DeviceClassChanged: "resource.k8s.io/DeviceClassUpdate",
	framework.GroupChanged:       "scheduling.k8s.io/PodGroupUpdate",
}

// queueCounts counts, for the metrics, the pods that enter queues, the gated pods, and the pods
// that plugins have refused. The queue's lock protects it.
type queueCounts struct {
	entered  *prometheus.CounterVec // by queue and event; nil = entries are not counted
	counters map[queueEntry]prometheus.Counter
	gated    int
	refused  map[refusal]int
}

// queueEntry is an entry of a pod into a queue for one cause.
type queueEntry struct {
	queue int
	cause string
}

// refusal is the refusal of pods of a profile by a plugin.
type refusal struct{ plugin, profile string }

// countEntry counts the entry of a pod into a queue.
func (c *queueCounts) countEntry(queue int, cause string) {
	if c.entered == nil {
		return
	}
	e := queueEntry{queue, cause}
	counter := c.counters[e]
	if counter == nil {
		counter = c.entered.WithLabelValues(queueNames[queue], cause)
		if c.counters == nil {
			c.counters = make(map[queueEntry]prometheus.Counter)
		}
		c.counters[e] = counter
	}
	counter.Inc()
}

// countRefusals replaces the plugins for which the pod is counted as refused. An empty set means
// that the pod is no longer counted.
func (c *queueCounts) countRefusals(pod *queuedPod, plugins map[string]bool) {
	if len(pod.attempt.countedFor) == 0 && len(plugins) == 0 {
		return
	}
	if c.refused == nil {
		c.refused = make(map[refusal]int)
	}
	profile := schedulerOf(pod.Pod)
	for plugin := range pod.attempt.countedFor {
		c.refused[refusal{plugin, profile}]--
	}
	for plugin := range plugins {
		c.refused[refusal{plugin, profile}]++
	}
	pod.attempt.countedFor = plugins
}

// queueSizes returns the number of pods in each queue, and the number of pods that each plugin has
// refused. The caller owns the map.
func (q *queue) queueSizes() (sizes [numQueues]int, refused map[refusal]int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sizes = [numQueues]int{queueActive: q.active.Len(), queueBackoff: q.backoff.Len(),
		queueUnschedulable: len(q.waiting), queueGated: q.counts.gated}
	return sizes, maps.Clone(q.counts.refused)
}
