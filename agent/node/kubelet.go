package node

import (
	"context"
	"io"
	"net"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/kubelet"
	"keelson.dev/keelson/agent/pod"
	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/stats"
	"keelson.dev/keelson/internal/blockdevice"
	"keelson.dev/keelson/internal/saturate"
)

// newStatistics returns the stats.Source that measures the resource usage of the node and its pods.
func (n *Node) newStatistics(rt agent.MeasuredRuntime, pods *pod.Set) *stats.Source {
	memory, share := n.cfg.Node.Capacity[v1.ResourceMemory]
	cpu := n.facts.currentNode().Status.Capacity[v1.ResourceCPU]
	info := &n.facts.info
	return stats.New(stats.Config{NodeName: n.cfg.NodeName, Measure: rt.MeasureUsage, Share: share,
		MeasureDetails: rt.MeasureDetails, Memory: saturate.Value(&memory),
		Started: time.Now(), Disk: func() (agent.Disk, error) {
			return diskusage.StatFileSystem(existingPath(n.cfg.Dirs.State))
		},
		DiskDevice: func() string { return deviceOf(existingPath(n.cfg.Dirs.State)) },
		Machine: stats.Machine{BootID: info.BootID, MachineID: info.MachineID, SystemUUID: info.SystemUUID,
			CPUs: cpu.AsApproximateFloat64()},
		Pods: n.session.Pods, Storage: pods.Storage})
}

// deviceOf returns the name of the block device with the file system of a path; "" if the path
// cannot be read.
func deviceOf(path string) string {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return ""
	}
	return blockdevice.Name(unix.Major(st.Dev), unix.Minor(st.Dev))
}

// newKubeletServer returns the node's HTTPS server with the kubelet's API. It listens on all
// addresses.
func (n *Node) newKubeletServer(source *stats.Source, trust agent.ServerTrust) *kubelet.Server {
	return kubelet.New(kubelet.Config{Listen: net.JoinHostPort("", strconv.Itoa(int(n.cfg.Listen.KubeletPort))),
		ServerTrust: trust,
		Resource:    source.Resource, Cadvisor: source.Cadvisor, Metrics: n.metricsWriter(source),
		Summary: source.Summary, Pods: n.session.Pods,
		AgentLog: n.cfg.Diagnostics.Recent.Bytes,
		Settings: n.cfg.settingsText, Reach: resolveAndRoute,
		Log: n.cfg.Log.With("part", "kubelet API")})
}

// metricsWriter returns a function that writes the response of /metrics. It contains the metrics of
// the agent, and of images, eviction, proxy, network policies, session and DNS if the agent runs
// them.
func (n *Node) metricsWriter(source *stats.Source) func(context.Context, io.Writer) error {
	return func(ctx context.Context, to io.Writer) error {
		err := source.WriteAgentMetrics(ctx, to)
		if err == nil && n.imageGC != nil {
			err = n.imageGC.writeMetrics(to)
		}
		if p := n.facts.pressure; err == nil && p != nil {
			err = p.writeMetrics(to)
		}
		if err == nil && n.cfg.Services.metrics != nil {
			err = n.cfg.Services.metrics(ctx, to)
		}
		if err == nil && n.policyMetrics != nil {
			err = n.policyMetrics(ctx, to)
		}
		if err == nil && n.sessionMetrics != nil {
			err = n.sessionMetrics(to)
		}
		if err == nil && n.cfg.PodNetwork.dns != nil {
			err = n.cfg.PodNetwork.dns.Metrics(to)
		}
		return err
	}
}
