package report

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// UsageReports stores the last usage report of each node in memory. Agents report to every replica,
// so each replica has the usage of all nodes.
type UsageReports struct {
	mu    sync.Mutex
	nodes map[string]*NodeUsage
}

// Limits of a node's usage report. Agents report every 15 s; a report older than usageMaxAge, about
// four intervals, is discarded.
const (
	usageMaxAge        = time.Minute
	usageMinInterval   = time.Second // minimum time between two reports; earlier reports are dropped
	maxUsagePods       = 1024        // number of pods per node; more than a node supports
	maxUsageContainers = 8192        // number of containers per node
	maxUsageName       = 253         // length of a pod UID or container name in bytes
	maxUsageValue      = 1 << 50     // value in nanocores (a million cores) or bytes (1 PiB)
)

// NodeUsage is the recent usage of a node and its pods. It is shared and must not be modified.
type NodeUsage struct {
	At   time.Time // time of the measurement on this replica's clock
	Node *Usage    // nil if the usage is not known
	// Pods contains the usage by pod UID. The reader must check that a pod is bound to the node:
	// reports about pods of other nodes are not trusted.
	Pods map[types.UID][]ContainerUsage

	received time.Time
}

// ContainerUsage is the usage of a running container.
type ContainerUsage struct {
	Name string
	Usage
}

// Usage is a CPU and memory usage.
type Usage struct {
	CPU    uint64        // nanocores, averaged over Window
	Memory uint64        // working set in bytes
	Window time.Duration // duration before the time of the measurement
}

// NewUsageReports returns an empty set of usage reports.
func NewUsageReports() *UsageReports { return &UsageReports{nodes: make(map[string]*NodeUsage)} }

var errUsageBound = errors.New("the value exceeds the limits of a node")

// RecordUsage replaces the node's usage report. It returns an error, and changes nothing, if the
// report is invalid.
func (u *UsageReports) RecordUsage(node string, m *fleetv1.NodeUsage, now time.Time) error {
	u.mu.Lock()
	previous := u.nodes[node]
	u.mu.Unlock()
	if previous != nil && now.Sub(previous.received) < usageMinInterval {
		return errors.New("the report follows the previous one too soon")
	}
	next, err := parseNodeUsage(m, now)
	if err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.nodes[node] = next
	return nil
}

// FreshReports returns the usage reports that are not older than usageMaxAge, by node. It deletes
// the others.
func (u *UsageReports) FreshReports(now time.Time) map[string]*NodeUsage {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.nodes, func(_ string, n *NodeUsage) bool { return now.Sub(n.At) > usageMaxAge })
	return maps.Clone(u.nodes)
}

// parseNodeUsage validates and decodes a node's usage report.
func parseNodeUsage(m *fleetv1.NodeUsage, now time.Time) (*NodeUsage, error) {
	age := time.Duration(m.GetAgeNano())
	if age < 0 || age > usageMaxAge {
		return nil, fmt.Errorf("usage measured %s ago: %w", age, errUsageBound)
	}
	if len(m.GetPods()) > maxUsagePods {
		return nil, fmt.Errorf("%d pods: %w", len(m.GetPods()), errUsageBound)
	}
	out := &NodeUsage{At: now.Add(-age), Pods: make(map[types.UID][]ContainerUsage, len(m.GetPods())), received: now}
	if m.GetNode() != nil {
		n, err := parseUsage(m.GetNode())
		if err != nil {
			return nil, fmt.Errorf("usage of the node: %w", err)
		}
		out.Node = &n
	}
	containers := 0
	for _, p := range m.GetPods() {
		if containers += len(p.GetContainers()); len(p.GetUid()) > maxUsageName || containers > maxUsageContainers {
			return nil, fmt.Errorf("%d containers: %w", containers, errUsageBound)
		}
		list := make([]ContainerUsage, 0, len(p.GetContainers()))
		for _, c := range p.GetContainers() {
			usage, err := parseUsage(c.GetUsed())
			if err == nil && len(c.GetName()) > maxUsageName {
				err = errUsageBound
			}
			if err != nil {
				return nil, fmt.Errorf("usage of a container of pod %s: %w", p.GetUid(), err)
			}
			list = append(list, ContainerUsage{Name: c.GetName(), Usage: usage})
		}
		out.Pods[types.UID(p.GetUid())] = list
	}
	return out, nil
}

func parseUsage(m *fleetv1.Used) (Usage, error) {
	out := Usage{CPU: m.GetCpuNano(), Memory: m.GetMemory(), Window: time.Duration(m.GetWindowNano())}
	if out.CPU > maxUsageValue || out.Memory > maxUsageValue || out.Window <= 0 || out.Window > time.Hour {
		return Usage{}, errUsageBound
	}
	return out, nil
}
