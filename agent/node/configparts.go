package node

import (
	"context"
	"io"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/dns"
	"keelson.dev/keelson/agent/network"
	"keelson.dev/keelson/agent/pod/admission"
	"keelson.dev/keelson/agent/proxy"
	"keelson.dev/keelson/internal/logtail"
	"keelson.dev/keelson/internal/reservedspace"
)

// JoinConfig is the configuration of how the node joins the cluster.
type JoinConfig struct {
	Servers []string // addresses of the control plane for agents, host:port
	Token   string
	// TokenFile is the file with the join token, which is used if Token is empty. The file is
	// removed once the node has its certificate.
	TokenFile string
}

// DirConfig lists the folders and sockets of the agent.
type DirConfig struct {
	State, Run, Logs   string
	LogLinks           string
	CgroupRoot         string // parent cgroup of all pods
	CNIConf, CNIBin    string
	Archives           string // image archives imported at start
	Runtime            string // folder of keelson-shim, keelson-oci and keelson-pause
	Kubelet            string // folder with the kubelet's layout, which CSI drivers and device plugins expect
	PluginRegistration string // folder in which drivers register; "" = plugins_registry in Kubelet
	DevicePlugins      string // folder in which device plugins find the agent's socket; "" = device-plugins in Kubelet
	PodResources       string // socket of the pod resources API; "" = pod-resources/kubelet.sock in Kubelet
}

// ObjectConfig is the configuration of the Node object, and of the thresholds of the node's
// pressure conditions.
type ObjectConfig struct {
	Capacity   v1.ResourceList
	MaxPods    int64
	Labels     map[string]string
	Taints     []v1.Taint
	FailSwapOn bool // do not start while the machine has active swap
	// With less free disk space than DiskFloor or fewer free inodes than InodeFloor, the node has
	// disk pressure. With less available memory than MemoryFloor, it has memory pressure. The zero
	// values of InodeFloor and MemoryFloor are Kubernetes' defaults.
	DiskFloor, InodeFloor, MemoryFloor reservedspace.Amount
}

// RegistryConfig configures the access to image registries.
type RegistryConfig struct {
	Insecure []string
	Mirrors  map[string][]string // registry, or "*" for all others → mirror hosts in the order in which they are tried
}

// PodConfig configures the pods of the node.
type PodConfig struct {
	// StartUnconfirmed makes the agent start the pods of its stored checkpoint after a reboot
	// without waiting for a control plane. The pods may have been replaced on other nodes.
	StartUnconfirmed bool
	RuntimeHandlers  []string // additional handler names for RuntimeClasses
	SeccompDefault   bool
	Security         *admission.Ceiling // highest Pod Security level of pods; nil: all pods are allowed
	ClusterDNS       []string           // DNS servers of pods; empty: Service kube-system/kube-dns
	ResolvConf       string
	PIDs             int64 // limit of processes and threads per pod; negative = no limit
	// if a container exceeds its memory limit, the kernel kills one of its processes instead of all
	SingleProcessOOMKill bool
}

// StorageConfig configures volumes.
type StorageConfig struct {
	// FenceAfter is the fence time: after this time of disconnection from the control plane, the
	// agent terminates pods with attached volumes; 0 = never.
	FenceAfter        time.Duration
	LocalVolumes      bool  // provide volumes on the node's own disk (driver local.csi.keelson.dev)
	LocalVolumesLimit int64 // limit of their total size in bytes; 0 = the size of the disk
}

// NetworkConfig configures the pod network.
type NetworkConfig struct {
	// New returns the pod network; it reads the objects of the node's view. nil: only pods with
	// hostNetwork run.
	New       func(agent.Objects) agent.Network
	isForeign func() bool // set by WithNetwork: reports whether another network product has a CNI configuration
	// hasOwnAddresses is set by WithNetwork. It reports whether all pods have addresses of
	// Keelson's network configuration.
	hasOwnAddresses func() bool
	// SourceExempt are the namespaces of pods that may send packets with source addresses other
	// than their own. "*" means all namespaces.
	SourceExempt     []string
	mode             network.Mode
	wireguard        network.Encryption
	ownKey           *network.OwnKey // the node's key in the mode WireGuard; otherwise nil
	unreachableNodes func() string   // set by WithNetwork: nodes with unreachable pods, and why
	Policies         bool            // enables network policies on the real pod network
	dns              *dns.Server     // set by WithNetwork
}

// ServiceConfig configures the Service proxy.
type ServiceConfig struct {
	Proxy Proxy // nil: no Service rules
	// Mode is the mode of the built-in proxy. NodePortAddresses are the address ranges at which it
	// serves node ports; empty: all addresses.
	Mode              proxy.Mode
	NodePortAddresses []netip.Prefix
	// Healthz is the address of the built-in proxy's health check for external load balancers,
	// HOST:PORT; "none" or empty: disabled.
	Healthz     string
	announcesL2 bool                                   // the node can announce load balancer addresses
	metrics     func(context.Context, io.Writer) error // nil: no metrics
}

// ListenConfig lists the addresses at which the agent serves.
type ListenConfig struct {
	DNS         string // additional address of the agent's DNS server; "none": only the Service's address
	API         string // loopback address that proxies to a ready replica of the API; "none" or empty: disabled
	KubeletPort int32  // port of the node's HTTPS server; 0: disabled
}

// Parts are replacements for parts of an agent. A nil field means the real part. A fake node sets
// all of them except Extra.
type Parts struct {
	Session Session
	Runtime agent.Runtime
	Images  agent.Images
	Volumes agent.Volumes
	Devices agent.Devices
	Prober  agent.Prober
	Trust   agent.ServerTrust // for the node's HTTPS server; nil: the session
	// Extra are additional parts of the agent by name, for example routes and DNS.
	Extra map[string]func(context.Context, agent.Objects, agent.Reporter) error
}

// DiagnosticConfig is the information about the agent that the node's API serves.
type DiagnosticConfig struct {
	Recent *logtail.Lines // the last lines of Config.Log; nil = none
	// Settings are the flags and their values, without secrets; nil = none.
	Settings map[string]string
}
