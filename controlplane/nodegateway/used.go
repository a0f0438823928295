package nodegateway

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// used holds the last usage report of each node in memory. Agents report to every replica, so each
// replica has the usage of all nodes.
type used struct {
	mu    sync.Mutex
	nodes map[string]*NodeUsed
}

// Limits for a node's usage report. Agents report every 15 s; a report older than usedFresh, about
// four intervals, is discarded.
const (
	usedFresh      = time.Minute
	usedLeastPause = time.Second // a report that follows the previous one sooner is dropped
	usedPods       = 1024        // pods per node; more than a node supports
	usedContainers = 8192        // containers per node
	usedName       = 253         // bytes of a pod UID or container name
	usedMost       = 1 << 50     // nanocores (a million cores), and bytes (1 PiB)
)

// NodeUsed is the recent usage of a node and its pods. It is shared: do not modify.
type NodeUsed struct {
	At   time.Time // time of the measurement on this replica's clock
	Node *Used     // nil = unknown
	// Pods holds the usage by pod UID. The reader must check that a pod is bound to the node:
	// reports about pods of other nodes are not trusted.
	Pods map[types.UID][]ContainerUsed

	heard time.Time
}

// ContainerUsed is the usage of a running container.
type ContainerUsed struct {
	Name string
	Used
}

// Used is a CPU and memory usage.
type Used struct {
	CPU    uint64        // nanocores, averaged over Window
	Memory uint64        // working set in bytes
	Window time.Duration // ends at the time of the measurement
}

func newUsed() *used { return &used{nodes: make(map[string]*NodeUsed)} }

var errUsageBound = errors.New("it is beyond what a node can use or hold")

// note replaces the node's usage report. An invalid report is rejected as a whole.
func (u *used) note(node string, m *fleetv1.NodeUsage, now time.Time) error {
	u.mu.Lock()
	before := u.nodes[node]
	u.mu.Unlock()
	if before != nil && now.Sub(before.heard) < usedLeastPause {
		return errors.New("it comes too soon after the one before")
	}
	next, err := usageOf(m, now)
	if err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.nodes[node] = next
	return nil
}

// all returns the fresh usage reports by node and drops the others.
func (u *used) all(now time.Time) map[string]*NodeUsed {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.nodes, func(_ string, n *NodeUsed) bool { return now.Sub(n.At) > usedFresh })
	return maps.Clone(u.nodes)
}

// Used returns the recent usage of the nodes that reported it to this replica. Nodes of earlier
// releases do not report.
func (s *Server) Used() map[string]*NodeUsed { return s.used.all(time.Now()) }

// usageOf validates and converts a node's usage report.
func usageOf(m *fleetv1.NodeUsage, now time.Time) (*NodeUsed, error) {
	age := time.Duration(m.GetAgeNano())
	if age < 0 || age > usedFresh {
		return nil, fmt.Errorf("it was measured %s ago: %w", age, errUsageBound)
	}
	if len(m.GetPods()) > usedPods {
		return nil, fmt.Errorf("%d pods: %w", len(m.GetPods()), errUsageBound)
	}
	out := &NodeUsed{At: now.Add(-age), Pods: make(map[types.UID][]ContainerUsed, len(m.GetPods())), heard: now}
	if m.GetNode() != nil {
		n, err := usedOf(m.GetNode())
		if err != nil {
			return nil, fmt.Errorf("the node's own: %w", err)
		}
		out.Node = &n
	}
	containers := 0
	for _, p := range m.GetPods() {
		if containers += len(p.GetContainers()); len(p.GetUid()) > usedName || containers > usedContainers {
			return nil, fmt.Errorf("%d containers: %w", containers, errUsageBound)
		}
		list := make([]ContainerUsed, 0, len(p.GetContainers()))
		for _, c := range p.GetContainers() {
			one, err := usedOf(c.GetUsed())
			if err == nil && len(c.GetName()) > usedName {
				err = errUsageBound
			}
			if err != nil {
				return nil, fmt.Errorf("a container of pod %s: %w", p.GetUid(), err)
			}
			list = append(list, ContainerUsed{Name: c.GetName(), Used: one})
		}
		out.Pods[types.UID(p.GetUid())] = list
	}
	return out, nil
}

func usedOf(m *fleetv1.Used) (Used, error) {
	out := Used{CPU: m.GetCpuNano(), Memory: m.GetMemory(), Window: time.Duration(m.GetWindowNano())}
	if out.CPU > usedMost || out.Memory > usedMost || out.Window <= 0 || out.Window > time.Hour {
		return Used{}, errUsageBound
	}
	return out, nil
}
