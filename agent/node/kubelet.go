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
	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/agent/kubelet"
	"keelson.dev/keelson/agent/pod"
	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/pod/lifecycle"
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
		Probes: n.probeMetricsWriter(source), Summary: source.Summary, Pods: n.session.Pods,
		Configuration: func() map[string]any { return kubeletConfiguration(&n.cfg, n.session) },
		AgentLog:      n.cfg.Diagnostics.Recent.Bytes,
		Settings:      n.cfg.settingsText, Reach: resolveAndRoute,
		Log: n.cfg.Log.With("part", "kubelet API")})
}

// probeMetricsWriter returns a function that writes the response of /metrics/probes. It contains
// only the start time of the agent if the prober is a replacement that counts nothing.
func (n *Node) probeMetricsWriter(source *stats.Source) func(context.Context, io.Writer) error {
	return func(_ context.Context, to io.Writer) error {
		err := source.WriteStartTime(to)
		if err == nil && n.probeMetrics != nil {
			err = n.probeMetrics(to)
		}
		return err
	}
}

// kubeletConfiguration returns the fields of a KubeletConfiguration that this agent has an
// equivalent of, except the settings of the HTTPS server. It contains no secret: it has neither the
// join token nor the file with it.
func kubeletConfiguration(cfg *Config, objects agent.Objects) map[string]any {
	restarts := map[string]string{"maxContainerRestartPeriod": lifecycle.RestartMax.String()}
	out := map[string]any{
		"port": cfg.Listen.KubeletPort, "podLogsDir": cfg.Dirs.Logs,
		"rotateCertificates": true, "serverTLSBootstrap": true,
		"registerNode": true, "registerWithTaints": cfg.Node.Taints,
		"clusterDNS": clusterDNS(cfg.Pods.ClusterDNS, objects)(), "resolvConf": cfg.Pods.ResolvConf,
		"cgroupRoot": cfg.Dirs.CgroupRoot, "cgroupDriver": "cgroupfs", "cgroupsPerQOS": true,
		"enforceNodeAllocatable": []string{"pods"}, "cpuCFSQuota": true,
		"cpuManagerPolicy": "none", "memoryManagerPolicy": "None", "topologyManagerPolicy": "none",
		"maxPods": cfg.Node.MaxPods, "podPidsLimit": cfg.Pods.PIDs, "seccompDefault": cfg.Pods.SeccompDefault,
		"singleProcessOOMKill": cfg.Pods.SingleProcessOOMKill, "failSwapOn": cfg.Node.FailSwapOn, "failCgroupV1": false,
		"evictionHard": map[string]string{"memory.available": cfg.memoryFloor().String(),
			"nodefs.available": cfg.Node.DiskFloor.String(), "imagefs.available": cfg.Node.DiskFloor.String(),
			"nodefs.inodesFree": cfg.inodeFloor().String()},
		"evictionPressureTransitionPeriod": eviction.PressureTransition.String(),
		"crashLoopBackOff":                 restarts,
		"serializeImagePulls":              false, "registryPullQPS": 0, "eventRecordQPS": 0, // 0 = no limit
		"imagePullCredentialsVerificationPolicy":    "NeverVerify",
		"configMapAndSecretChangeDetectionStrategy": "Watch",
		"localStorageCapacityIsolation":             true,
		"containerRuntimeEndpoint":                  "", // the runtime is a part of the agent
	}
	if domain := objects.Cluster().Domain; domain != "" {
		out["clusterDomain"] = domain
	}
	logs := cfg.OCI().WithDefaults()
	out["containerLogMaxSize"] = strconv.FormatInt(logs.LogMaxSize>>20, 10) + "Mi"
	out["containerLogMaxFiles"] = logs.LogMaxFiles
	return out
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
