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
	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/stats"
	"keelson.dev/keelson/internal/saturate"
)

// newStatistics returns the stats.Source that measures the resource usage of the node and its pods.
func (n *Node) newStatistics(rt agent.MeasuredRuntime, pods *pod.Set) *stats.Source {
	memory, share := n.cfg.Node.Capacity[v1.ResourceMemory]
	return stats.New(stats.Config{NodeName: n.cfg.NodeName, Measure: rt.MeasureUsage, Share: share,
		Memory:  saturate.Value(&memory),
		Started: time.Now(), Disk: func() (agent.Disk, error) {
			return diskusage.StatFileSystem(existingPath(n.cfg.Dirs.State))
		},
		Pods: n.session.Pods, Storage: pods.Storage})
}

// newKubeletServer returns the node's HTTPS server with the kubelet's API. It listens on all
// addresses.
func (n *Node) newKubeletServer(source *stats.Source, trust agent.ServerTrust) *kubelet.Server {
	return kubelet.New(kubelet.Config{Listen: net.JoinHostPort("", strconv.Itoa(int(n.cfg.Listen.KubeletPort))),
		ServerTrust: trust,
		Resource:    source.Resource, Metrics: n.metricsWriter(source), Summary: source.Summary, Pods: n.session.Pods,
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
