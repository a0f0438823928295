package features

import "testing"

// sameDefaults are defaults without a flag of the same name that equal those of Kubernetes 1.37: of the component and
// setting, the value, and the place FILE: TEXT that holds the value.
var sameDefaults = []struct{ upstream, value, source string }{
	{kubelet + " imageMinimumGCAge", "2m", "agent/image/choose.go: const minIdle = 2 * time.Minute"},
	{kubelet + " imageGCHighThresholdPercent, imageGCLowThresholdPercent", "85, 80", "agent/image/choose.go: above := min(floor, max(0, size-floor)/2)"},
	{kubelet + " evictionHard memory.available", "100Mi", "agent/node/pressure.go: defaultMemoryFloor = reservedspace.Bytes(100 << 20)"},
	{kubelet + " evictionHard nodefs.inodesFree", "5%", "agent/node/pressure.go: defaultInodeFloor = reservedspace.Percent(5)"},
	{kubelet + " evictionPressureTransitionPeriod", "5m", "agent/eviction/eviction.go: PressureTransition = 5 * time.Minute"},
	{kubelet + " containerLogMaxSize", "10Mi", "agent/oci/oci.go: cfg.LogMaxSize = 10 << 20"},
	{kubelet + " containerLogMaxFiles", "5", "agent/oci/oci.go: cfg.LogMaxFiles = 5"},
	{kubelet + " podLogsDir", "/var/log/pods", "agent/node/config.go: \"log-dir\", \"/var/log/pods\""},
	{kubelet + " port", "10250", "agent/node/config.go: c.KubeletPort = 10250"},
	{kubelet + " nodeStatusMaxImages", "50", "agent/node/facts.go: imagesReported = 50"},
	{kubelet + " nodeStatusUpdateFrequency", "10s", "agent/node/facts.go: seldom = time.Second, 10 * time.Second"},
	{kubelet + " cpuCFSQuotaPeriod", "100ms", "agent/pod/resources.go: quotaPeriod = 100_000"},
	{kubelet + " oomScoreAdj", "-999", "deploy/install/keelson-agent.service: OOMScoreAdjust=-999"},
	{kubelet + " enforceNodeAllocatable", "pods", "agent/oci/tiers.go: {allPods, \"memory\", memoryFile, limit(t.Memory, noMemoryLimit)}"},
	{kubelet + " cgroupsPerQOS", "true", "agent/oci/tiers.go: bestEffort = \"kubepods/besteffort\""},
	{kubelet + " authentication.webhook.cacheTTL", "2m", "agent/kubelet/who.go: allowedFor = 2 * time.Minute"},
	{kubelet + " authorization.webhook.cacheUnauthorizedTTL", "30s", "agent/kubelet/who.go: refusedFor = 30 * time.Second"},
	{scheduler + " podMaxBackoffSeconds", "10", "controlplane/scheduler/queue.go: maxBackoff     = 10 * time.Second"},
	{scheduler + " time until an unschedulable pod is tried again", "5m", "controlplane/scheduler/queue.go: maxWaitInQueue = 5 * time.Minute"},
	{scheduler + " percentageOfNodesToScore", "0: adaptive", "controlplane/scheduler/framework/profile.go: percent = max(50-n/125, 5)"},
	{scheduler + " weight of TaintToleration", "3", "controlplane/scheduler/plugins/plugins.go: tainttoleration.Plugin{}, Weight: 3}"},
	{scheduler + " weight of NodeAffinity", "2", "controlplane/scheduler/plugins/plugins.go: nodeaffinity.Plugin{}, Weight: 2}"},
	{scheduler + " weight of PodTopologySpread", "2", "controlplane/scheduler/plugins/plugins.go: podtopologyspread.Plugin{}, Weight: 2}"},
	{scheduler + " weight of InterPodAffinity", "2", "controlplane/scheduler/plugins/plugins.go: interpodaffinity.Plugin{}, Weight: 2}"},
	{scheduler + " weight of NodeResourcesFit", "1", "controlplane/scheduler/plugins/plugins.go: noderesourcesfit.Plugin{}, Weight: 1}"},
	{scheduler + " weight of NodeResourcesBalancedAllocation", "1", "controlplane/scheduler/plugins/plugins.go: balancedallocation.Plugin{}, Weight: 1}"},
	{scheduler + " weight of ImageLocality", "1", "controlplane/scheduler/plugins/plugins.go: imagelocality.Plugin{}, Weight: 1}"},
	{scheduler + " weight of DynamicResources", "2", "controlplane/scheduler/plugins/plugins.go: dynamicresources.DefaultPatience), Weight: 2}"},
	{scheduler + " VolumeBinding bindTimeoutSeconds", "600", "controlplane/scheduler/plugins/volumebinding/volumebinding.go: const DefaultPatience = 10 * time.Minute"},
	{scheduler + " DynamicResources bindingTimeout", "600s", "controlplane/scheduler/plugins/dynamicresources/dynamicresources.go: DefaultPatience = 10 * time.Minute"},
	{scheduler + " DefaultPreemption minCandidateNodesPercentage", "10", "controlplane/scheduler/plugins/defaultpreemption/defaultpreemption.go: triedPercent = 10"},
	{scheduler + " DefaultPreemption minCandidateNodesAbsolute", "100", "controlplane/scheduler/plugins/defaultpreemption/defaultpreemption.go: triedLeast   = 100"},
	{manager + " --horizontal-pod-autoscaler-sync-period", "15s", "controlplane/controllers/horizontalpodautoscaler/horizontalpodautoscaler.go: const Period = 15 * time.Second"},
	{manager + " --horizontal-pod-autoscaler-tolerance, --horizontal-pod-autoscaler-cpu-initialization-period, --horizontal-pod-autoscaler-initial-readiness-delay", "0.1, 5m, 30s",
		"controlplane/controllers/horizontalpodautoscaler/plan.go: Options{Tolerance: 0.1, CPUInitialization: 5 * time.Minute, InitialReadiness: 30 * time.Second,"},
	{manager + " --horizontal-pod-autoscaler-downscale-stabilization", "5m", "controlplane/controllers/horizontalpodautoscaler/plan.go: DownscaleStabilization: 5 * time.Minute}"},
	{manager + " --node-monitor-period", "5s", "controlplane/controllers/nodelifecycle/nodelifecycle.go: const lookPeriod = 5 * time.Second"},
	{manager + " --node-eviction-rate", "0.1", "controlplane/controllers/nodelifecycle/zones.go: evictEvery       = 10 * time.Second"},
	{manager + " --secondary-node-eviction-rate", "0.01", "controlplane/controllers/nodelifecycle/zones.go: evictSlowlyEvery = 100 * time.Second"},
	{manager + " --unhealthy-zone-threshold", "0.55", "controlplane/controllers/nodelifecycle/zones.go: unhealthyPercent = 55"},
	{manager + " --large-cluster-size-threshold", "50", "controlplane/controllers/nodelifecycle/zones.go: smallZone        = 50"},
	{manager + " --terminated-pod-gc-threshold", "12500", "controlplane/controllers/podgc/podgc.go: cmp.Or(o.Finished, 12500)"},
	{manager + " --cluster-signing-duration", "8760h", "controlplane/controllers/certificate/signers.go: longestLife  = 365 * 24 * time.Hour"},
	{manager + " --max-endpoints-per-slice", "100", "controlplane/controllers/endpointslice/plan.go: const MaxEndpoints = 100"},
	{manager + " --mirroring-max-endpoints-per-subset", "1000", "controlplane/controllers/endpointslice/mirror.go: const MaxMirrored = 1000"},
	{manager + " --node-cidr-mask-size-ipv4", "24", "controlplane/controllers/nodecidr/nodecidr.go: cmp.Or(o.NodeBits4, 24)"},
	{manager + " --node-cidr-mask-size-ipv6", "64", "controlplane/controllers/nodecidr/nodecidr.go: cmp.Or(o.NodeBits6, 64)"},
	{apiserver + " --event-ttl", "1h", "controlplane/api/kinds/core/event.go: const eventTTL = time.Hour"},
	{apiserver + " --request-timeout, --min-request-timeout", "1m, 1800", "controlplane/apiserver/config.go: {&c.RequestTimeout, time.Minute}, {&c.MinWatch, 30 * time.Minute}"},
	{apiserver + " --max-requests-inflight, --max-mutating-requests-inflight", "400, 200", "controlplane/apiserver/flowcontrol/flow.go: Read: 400, Write: 200"},
	{apiserver + " --service-node-port-range", "30000-32767", "controlplane/apiserver/config.go: c.NodePorts = [2]int{30000, 32767}"},
	{apiserver + " --etcd-compaction-interval", "5m", "controlplane/server/command/command.go: \"history-age\", 5*time.Minute"},
	{kubeProxy + " healthzBindAddress", ":10256", "agent/node/config.go: \"proxy-healthz-address\""},
}

// The defaults that the table of differences leaves out are those of Kubernetes.
func TestDefaultsThatAreTheSame(t *testing.T) {
	for _, s := range sameDefaults {
		checkSource(t, s.upstream, s.source, s.value)
	}
}
