package node

import (
	"context"
	"io"
	"net"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/kubelet"
	"keelson.dev/keelson/agent/pod"
	"keelson.dev/keelson/agent/stats"
	"keelson.dev/keelson/internal/saturate"
)

// statistics measures what the node and its pods use.
func (n *Node) statistics(rt agent.MeasuredRuntime, pods *pod.Set) *stats.Source {
	memory, share := n.cfg.Capacity[v1.ResourceMemory]
	return stats.New(stats.Config{NodeName: n.cfg.NodeName, Measure: rt.MeasureUsage, Share: share, Memory: saturate.Value(&memory),
		Started: time.Now(), Disk: func() (agent.Disk, error) { return pod.DiskOf(existing(n.cfg.StateDir)) },
		Pods: n.session.Pods, Storage: pods.Storage})
}

// kubelet is the node's own HTTPS server, on every address of the node.
func (n *Node) kubelet(source *stats.Source, trust agent.ServerTrust) *kubelet.Server {
	return kubelet.New(kubelet.Config{Listen: net.JoinHostPort("", strconv.Itoa(int(n.cfg.KubeletPort))), ServerTrust: trust,
		Resource: source.Resource, Metrics: n.metrics(source), Summary: source.Summary, Pods: n.session.Pods, AgentLog: n.cfg.Recent.Bytes,
		Settings: n.cfg.settings, Reach: reach,
		Log: n.cfg.Log.With("part", "kubelet API")})
}

// metrics is what /metrics says: of the agent, and of its images, the proxy, network policies and the DNS server where there are any.
func (n *Node) metrics(source *stats.Source) func(context.Context, io.Writer) error {
	return func(ctx context.Context, to io.Writer) error {
		err := source.Own(ctx, to)
		if err == nil && n.room != nil {
			err = n.room.writeMetrics(to)
		}
		if p := n.facts.pressure; err == nil && p != nil {
			err = p.writeMetrics(to)
		}
		if err == nil && n.cfg.proxyMetrics != nil {
			err = n.cfg.proxyMetrics(ctx, to)
		}
		if err == nil && n.policyMetrics != nil {
			err = n.policyMetrics(ctx, to)
		}
		if err == nil && n.sessionMetrics != nil {
			err = n.sessionMetrics(to)
		}
		if err == nil && n.cfg.dns != nil {
			err = n.cfg.dns.Metrics(to)
		}
		return err
	}
}
