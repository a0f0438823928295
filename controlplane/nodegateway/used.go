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

// used remembers what each node said last of its use. Agents tell every replica, so that each answers for all nodes;
// it is in no store.
type used struct {
	mu    sync.Mutex
	nodes map[string]*NodeUsed
}

// What is remembered of one node, and how long: agents tell every 15 s, and a figure older than some four of their
// messages says nothing of now.
const (
	usedFresh      = time.Minute
	usedLeastPause = time.Second // what comes sooner after the message before is dropped
	usedPods       = 1024        // of a node; more than nodes are made for
	usedContainers = 8192        // of all pods of a node
	usedName       = 253         // bytes of a UID, and of a container's name
	usedMost       = 1 << 50     // billionths of a processor (a million of them), and bytes (a pebibyte)
)

// NodeUsed is what a node and its pods used lately. It is shared: do not modify.
type NodeUsed struct {
	At   time.Time // of the measurement, on this replica's clock
	Node *Used     // nil = not known
	// Pods are known by their UIDs. Whether a pod is bound to the node is for the reader to see: a node that speaks of
	// the pods of others is not believed.
	Pods map[types.UID][]ContainerUsed

	heard time.Time
}

// ContainerUsed is what a running container used.
type ContainerUsed struct {
	Name string
	Used
}

// Used is a use of processors and memory.
type Used struct {
	CPU    uint64        // billionths of a processor, on average over Window
	Memory uint64        // working set in bytes
	Window time.Duration // ends with the measurement
}

func newUsed() *used { return &used{nodes: make(map[string]*NodeUsed)} }

var errUsageBound = errors.New("it is beyond what a node can use or hold")

// note remembers what a node says instead of what it said before, all of it or nothing.
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

// all is what the nodes said that is fresh. What is not is forgotten.
func (u *used) all(now time.Time) map[string]*NodeUsed {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.nodes, func(_ string, n *NodeUsed) bool { return now.Sub(n.At) > usedFresh })
	return maps.Clone(u.nodes)
}

// Used is what the nodes used lately, as far as this replica was told. Nodes of an older release say nothing.
func (s *Server) Used() map[string]*NodeUsed { return s.used.all(time.Now()) }

// usageOf reads a message, which may be anything.
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
