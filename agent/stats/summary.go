package stats

import (
	"bufio"
	"context"
	"encoding/json"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"keelson.dev/keelson/agent"
)

// Summary writes the response of /stats/summary to output. It encodes one pod at a time to save
// memory. If cpuAndMemory is true it omits everything else, like the kubelet's parameter
// only_cpu_and_memory. If it cannot measure, it returns an error and writes nothing.
func (s *Source) Summary(ctx context.Context, output io.Writer, cpuAndMemory bool) error {
	sample, err := s.Sample(ctx)
	if sample == nil {
		return err
	}
	w := bufio.NewWriter(output)
	node := s.nodeStats(sample, cpuAndMemory)
	head, err := json.Marshal(node)
	if err != nil {
		return err
	}
	put := func(b ...[]byte) {
		for _, p := range b {
			_, _ = w.Write(p) // Flush returns the error
		}
	}
	put([]byte(`{"node":`), head, []byte(`,"pods":[`))
	var stored podStorage
	if !cpuAndMemory {
		stored = s.readStorage()
	}
	for i := range sample.Pods {
		p := podStats(sample, &sample.Pods[i], cpuAndMemory)
		stored.addTo(p, sample.Pods[i].UID)
		one, err := json.Marshal(p)
		if err != nil {
			return err
		}
		if i > 0 {
			put([]byte(","))
		}
		put(one)
	}
	put([]byte("]}\n"))
	return w.Flush()
}

func (s *Source) nodeStats(sample *Sample, cpuAndMemory bool) *summary.NodeStats {
	out := &summary.NodeStats{NodeName: s.cfg.NodeName, StartTime: metav1.NewTime(s.cfg.Started),
		CPU: cpuStats(sample, usageKey{}, &sample.Node), Memory: memoryStats(&sample.Node),
		Swap: swapStats(&sample.Node)}
	if cpuAndMemory || s.cfg.Disk == nil {
		return out
	}
	if d, err := s.cfg.Disk(); err == nil {
		used, inodes := d.Capacity-min(d.Capacity, d.Available), d.Inodes-min(d.Inodes, d.InodesFree)
		out.Fs = &summary.FsStats{Time: metav1.NewTime(sample.At), AvailableBytes: &d.Available,
			CapacityBytes: &d.Capacity,
			UsedBytes:     &used, InodesFree: &d.InodesFree, Inodes: &d.Inodes, InodesUsed: &inodes}
	}
	if sample.Node.HasProcesses {
		n := int64(sample.Node.Processes)
		out.Rlimit = &summary.RlimitStats{Time: metav1.NewTime(sample.At), NumOfRunningProcesses: &n}
	}
	return out
}

func podStats(sample *Sample, p *agent.PodUsage, cpuAndMemory bool) *summary.PodStats {
	out := &summary.PodStats{PodRef: summary.PodReference{Name: p.Name, Namespace: p.Namespace, UID: string(p.UID)},
		StartTime: metav1.NewTime(p.Started), Containers: []summary.ContainerStats{},
		CPU: cpuStats(sample, usageKey{pod: p.UID}, &p.Usage), Memory: memoryStats(&p.Usage), Swap: swapStats(&p.Usage)}
	for i := range p.Containers {
		c := &p.Containers[i]
		out.Containers = append(out.Containers, summary.ContainerStats{Name: c.Name,
			StartTime: metav1.NewTime(c.Started),
			CPU:       cpuStats(sample, usageKey{p.UID, c.Name}, &c.Usage), Memory: memoryStats(&c.Usage),
			Swap: swapStats(&c.Usage)})
	}
	if cpuAndMemory {
		return out
	}
	if p.HasProcesses {
		out.ProcessStats = &summary.ProcessStats{ProcessCount: &p.Processes}
	}
	if len(p.Network) > 0 {
		out.Network = &summary.NetworkStats{Time: metav1.NewTime(p.At)}
		for i := range p.Network {
			n := &p.Network[i]
			one := summary.InterfaceStats{Name: n.Name, RxBytes: &n.Received, RxErrors: &n.ReceiveErrors,
				TxBytes: &n.Sent, TxErrors: &n.SendingErrors}
			if i == 0 || n.Name == "eth0" {
				out.Network.InterfaceStats = one
			}
			out.Network.Interfaces = append(out.Network.Interfaces, one)
		}
	}
	return out
}

func cpuStats(s *Sample, k usageKey, u *agent.Usage) *summary.CPUStats {
	if !u.HasCPU {
		return nil
	}
	out := &summary.CPUStats{Time: metav1.NewTime(u.At), UsageCoreNanoSeconds: &u.CPU}
	if r, ok := s.rates[k]; ok {
		out.UsageNanoCores = &r
	}
	return out
}

func memoryStats(u *agent.Usage) *summary.MemoryStats {
	if !u.HasMemory {
		return nil
	}
	out := &summary.MemoryStats{Time: metav1.NewTime(u.At), UsageBytes: &u.Memory, WorkingSetBytes: &u.WorkingSet,
		RSSBytes: &u.RSS, PageFaults: &u.Faults, MajorPageFaults: &u.MajorFaults}
	if u.Limit > 0 {
		left := u.Limit - min(u.Limit, u.WorkingSet)
		out.AvailableBytes = &left
	}
	return out
}

func swapStats(u *agent.Usage) *summary.SwapStats {
	if !u.HasSwap {
		return nil
	}
	out := &summary.SwapStats{Time: metav1.NewTime(u.At), SwapUsageBytes: &u.Swap}
	if u.HasSwapLimit {
		left := u.SwapLimit - min(u.SwapLimit, u.Swap)
		out.SwapAvailableBytes = &left
	}
	return out
}
