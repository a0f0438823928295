package core

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Spaces of a Service's reservations. At most one Service holds a value in each space.
const (
	SpaceClusterIPs = "clusterips" // "10.96.0.10"
	SpaceNodePorts  = "nodeports"  // "TCP-30080"
)

// The range of node ports.
const (
	MinNodePort = 30000
	MaxNodePort = 32767
)

const clientIPTimeout = int32(3 * 60 * 60) // seconds; Kubernetes' default

// ServiceKind returns the definition of the kind Service.
func ServiceKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Service", CreateOnUpdate: true, Plural: "services", Singular: "service", Short: []string{"svc"}, InAllCategory: true,
		Rule: validation.NameIsDNSLabel,
	}, func(l *corev1.ServiceList) *[]corev1.Service { return &l.Items })
	k.ReturnsDeleted = true
	k.Default = builder.Default(DefaultService)
	k.OwnedDefault = builder.Default(defaultOwnedService)
	builder.SeparateStatus(k, func(o *corev1.Service) *corev1.ServiceStatus { return &o.Status },
		builder.Accessors[*corev1.Service]{
			Spec:     func(s *corev1.Service) any { return s.Spec },
			CopySpec: func(obj, old *corev1.Service) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *corev1.Service) {
				obj.Status = corev1.ServiceStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
				if obj.Spec.Type != corev1.ServiceTypeLoadBalancer {
					obj.Status.LoadBalancer = corev1.LoadBalancerStatus{}
				}
			},
		})
	status := k.Subresources["status"]
	keep := status.PrepareUpdate
	status.PrepareUpdate = func(obj, old api.Object) {
		keep(obj, old)
		defaultIPModes(obj.(*corev1.Service))
	}
	builder.PrepareCreate(k, func(s *corev1.Service) { s.Generation = 0 })
	builder.PrepareUpdate(k, keepAllocated)
	builder.AddValidation(k, ValidateService)
	builder.AddUpdateValidation(k, validateServiceUpdate)
	builder.AddStatusValidation(k, validateServiceStatus)
	k.Reservations = func(o api.Object) []api.Reservation { return ServiceReservations(o.(*corev1.Service)) }
	k.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Type"), builder.StringColumn("Cluster-IP"),
		builder.StringColumn("External-IP"), builder.StringColumn("Port(s)"), builder.AgeColumn, builder.WideColumn("Selector"))
	k.Row = builder.Row(serviceRow)
	k.Fields = builder.Fields(func(s *corev1.Service) fields.Set {
		return fields.Set{"spec.clusterIP": s.Spec.ClusterIP, "spec.type": string(s.Spec.Type)}
	})
	builder.AddSubresource(k, "proxy", &api.Subresource{GVK: corev1.SchemeGroupVersion.WithKind("ServiceProxyOptions"),
		Verbs: builder.ProxyVerbs})
	return k
}

// DefaultService sets the defaults of a Service.
func DefaultService(s *corev1.Service) {
	defaultOwnedService(s)
	spec := &s.Spec
	if spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	// A client that sets only clusterIPs is rejected, as in Kubernetes.
	if spec.ClusterIP != "" && len(spec.ClusterIPs) == 0 {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
}

// defaultOwnedService sets the defaults that are attributed to the client. As in Kubernetes, a
// client that sets only clusterIP does not own clusterIPs.
func defaultOwnedService(s *corev1.Service) {
	spec := &s.Spec
	builder.SetDefault(&spec.Type, corev1.ServiceTypeClusterIP)
	builder.SetDefault(&spec.SessionAffinity, corev1.ServiceAffinityNone)
	if spec.SessionAffinity == corev1.ServiceAffinityNone {
		spec.SessionAffinityConfig = nil
	}
	if spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		builder.SetDefaultPtr(&spec.SessionAffinityConfig, corev1.SessionAffinityConfig{})
		builder.SetDefaultPtr(&spec.SessionAffinityConfig.ClientIP, corev1.ClientIPConfig{})
		builder.SetDefaultPtr(&spec.SessionAffinityConfig.ClientIP.TimeoutSeconds, clientIPTimeout)
	}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		builder.SetDefault(&p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort == (intstr.IntOrString{}) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	defaultIPModes(s)
	if spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	if externallyAccessible(spec) {
		builder.SetDefault(&spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	builder.SetDefaultPtr(&spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster)
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		builder.SetDefaultPtr(&spec.AllocateLoadBalancerNodePorts, true)
	}
}

// defaultIPModes sets the missing ipMode of addresses that a load balancer reports. Older
// controllers do not set it.
func defaultIPModes(s *corev1.Service) {
	for i := range s.Status.LoadBalancer.Ingress {
		if in := &s.Status.LoadBalancer.Ingress[i]; in.IP != "" {
			builder.SetDefaultPtr(&in.IPMode, corev1.LoadBalancerIPModeVIP)
		}
	}
}

func usesNodePorts(t corev1.ServiceType) bool {
	return t == corev1.ServiceTypeNodePort || t == corev1.ServiceTypeLoadBalancer
}

// NeedsClusterIP reports whether the Service has, or is to be allocated, its own cluster IP.
func NeedsClusterIP(s *corev1.Service) bool {
	return s.Spec.Type != corev1.ServiceTypeExternalName && s.Spec.ClusterIP != corev1.ClusterIPNone
}

// NeedsNodePorts reports whether each port of the Service has, or is to be allocated, a node port.
func NeedsNodePorts(s *corev1.Service) bool {
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		return true
	case corev1.ServiceTypeLoadBalancer:
		return s.Spec.AllocateLoadBalancerNodePorts == nil || *s.Spec.AllocateLoadBalancerNodePorts
	}
	return false
}

// keepAllocated copies allocated values that the client omitted from old. It also clears the values
// that the new type does not have. A value that the client also changed is not cleared, so that
// validation rejects it.
func keepAllocated(obj, old *corev1.Service) {
	DefaultService(obj)
	SyncClusterIPs(&obj.Spec, &old.Spec)
	if NeedsClusterIP(obj) && NeedsClusterIP(old) && obj.Spec.ClusterIP == "" {
		if obj.Spec.ClusterIP = old.Spec.ClusterIP; len(obj.Spec.ClusterIPs) == 0 {
			obj.Spec.ClusterIPs = slices.Clone(old.Spec.ClusterIPs)
		}
	}
	if NeedsNodePorts(obj) && usesNodePorts(old.Spec.Type) {
		keepNodePorts(obj, old)
	}
	if old.Spec.Type != corev1.ServiceTypeExternalName && obj.Spec.Type == corev1.ServiceTypeExternalName {
		dropAddresses(&obj.Spec, &old.Spec)
	}
	if usesNodePorts(old.Spec.Type) && !usesNodePorts(obj.Spec.Type) && !changesNodePorts(obj, old) {
		for i := range obj.Spec.Ports {
			obj.Spec.Ports[i].NodePort = 0
		}
	}
	dropBalancing(&obj.Spec, &old.Spec)
}

// SyncClusterIPs sets clusterIPs to clusterIP if a client that does not know clusterIPs changed
// only clusterIP.
func SyncClusterIPs(spec, old *corev1.ServiceSpec) {
	if spec.ClusterIP != old.ClusterIP && spec.ClusterIP != "" && slices.Equal(spec.ClusterIPs, old.ClusterIPs) {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
}

// dropAddresses clears the unchanged cluster IPs and IP families of a Service that becomes an
// ExternalName.
func dropAddresses(spec, old *corev1.ServiceSpec) {
	if spec.ClusterIP == old.ClusterIP && slices.Equal(spec.ClusterIPs, old.ClusterIPs) {
		spec.ClusterIP, spec.ClusterIPs = "", nil
	}
	if slices.Equal(spec.IPFamilies, old.IPFamilies) {
		spec.IPFamilies = nil
	}
	if fieldrules.Deref(spec.IPFamilyPolicy) == fieldrules.Deref(old.IPFamilyPolicy) {
		spec.IPFamilyPolicy = nil
	}
}

// changesNodePorts reports whether obj names a node port that old does not have.
func changesNodePorts(obj, old *corev1.Service) bool {
	had := map[int32]bool{0: true}
	for _, p := range old.Spec.Ports {
		had[p.NodePort] = true
	}
	return slices.ContainsFunc(obj.Spec.Ports, func(p corev1.ServicePort) bool { return !had[p.NodePort] })
}

// dropBalancing clears the load balancer and external traffic fields that the new type does not
// have.
func dropBalancing(spec, old *corev1.ServiceSpec) {
	if needsHealthPort(old) && !needsHealthPort(spec) && spec.HealthCheckNodePort == old.HealthCheckNodePort {
		spec.HealthCheckNodePort = 0
	}
	if externallyAccessible(old) && !externallyAccessible(spec) && spec.ExternalTrafficPolicy == old.ExternalTrafficPolicy {
		spec.ExternalTrafficPolicy = ""
	}
	if old.Type != corev1.ServiceTypeLoadBalancer || spec.Type == corev1.ServiceTypeLoadBalancer {
		return
	}
	if fieldrules.IsTrue(spec.AllocateLoadBalancerNodePorts) == fieldrules.IsTrue(old.AllocateLoadBalancerNodePorts) {
		spec.AllocateLoadBalancerNodePorts = nil
	}
	if fieldrules.SemanticEqual(spec.LoadBalancerClass, old.LoadBalancerClass) {
		spec.LoadBalancerClass = nil
	}
}

// externallyAccessible reports whether traffic reaches the Service from outside the cluster.
func externallyAccessible(s *corev1.ServiceSpec) bool {
	return usesNodePorts(s.Type) || s.Type == corev1.ServiceTypeClusterIP && len(s.ExternalIPs) > 0
}

func keepNodePorts(obj, old *corev1.Service) {
	type key struct {
		protocol corev1.Protocol
		port     int32
	}
	was := map[key]int32{}
	for _, p := range old.Spec.Ports {
		was[key{p.Protocol, p.Port}] = p.NodePort
	}
	taken := map[string]bool{}
	for _, p := range obj.Spec.Ports {
		taken[nodePortValue(p)] = true
	}
	for i := range obj.Spec.Ports {
		p := &obj.Spec.Ports[i]
		if p.NodePort != 0 {
			continue
		}
		kept := *p
		kept.NodePort = was[key{p.Protocol, p.Port}]
		if kept.NodePort != 0 && !taken[nodePortValue(kept)] {
			*p = kept
			taken[nodePortValue(kept)] = true
		}
	}
}

// needsHealthPort reports whether load balancers check a node port of their own to find the nodes
// with endpoints.
func needsHealthPort(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeLoadBalancer && s.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

func nodePortValue(p corev1.ServicePort) string {
	return NodePort{Protocol: p.Protocol, Port: p.NodePort}.Value()
}

// ServiceReservations returns the addresses and ports that a Service reserves.
func ServiceReservations(s *corev1.Service) []api.Reservation {
	var out []api.Reservation
	if NeedsClusterIP(s) {
		for i, ip := range s.Spec.ClusterIPs {
			if ip != "" && ip != corev1.ClusterIPNone {
				out = append(out, api.Reservation{Space: SpaceClusterIPs, Value: ip, Field: fmt.Sprintf("spec.clusterIPs[%d]", i)})
			}
		}
		if len(s.Spec.ClusterIPs) == 0 && s.Spec.ClusterIP != "" {
			out = append(out, api.Reservation{Space: SpaceClusterIPs, Value: s.Spec.ClusterIP, Field: "spec.clusterIP"})
		}
	}
	for _, p := range NodePorts(s) {
		out = append(out, api.Reservation{Space: SpaceNodePorts, Value: p.Value(), Field: p.Field})
	}
	return out
}

// NodePort is a port that a Service has on every node.
type NodePort struct {
	Protocol corev1.Protocol
	Port     int32
	Field    string // path of the port's field in the Service
}

// Value returns the value of the port's reservation.
func (p NodePort) Value() string { return fmt.Sprintf("%s-%d", p.Protocol, p.Port) }

// String returns the port in a readable form.
func (p NodePort) String() string { return fmt.Sprintf("%d/%s", p.Port, p.Protocol) }

// NodePorts returns the node ports of a Service, including the port for health checks by load
// balancers.
func NodePorts(s *corev1.Service) (out []NodePort) {
	if !usesNodePorts(s.Spec.Type) {
		return nil
	}
	for i, p := range s.Spec.Ports {
		if p.NodePort != 0 {
			out = append(out, NodePort{p.Protocol, p.NodePort, fmt.Sprintf("spec.ports[%d].nodePort", i)})
		}
	}
	if n := s.Spec.HealthCheckNodePort; n != 0 && needsHealthPort(&s.Spec) {
		out = append(out, NodePort{corev1.ProtocolTCP, n, "spec.healthCheckNodePort"})
	}
	return out
}

func serviceRow(s *corev1.Service, now time.Time) []any {
	var ports []string
	for _, p := range s.Spec.Ports {
		text := strconv.Itoa(int(p.Port))
		if p.NodePort > 0 {
			text += ":" + strconv.Itoa(int(p.NodePort))
		}
		ports = append(ports, text+"/"+string(p.Protocol))
	}
	return []any{s.Name, string(s.Spec.Type), builder.OrNone(s.Spec.ClusterIP), externalIP(s),
		builder.OrNone(strings.Join(ports, ",")),
		builder.Age(s, now), labels.FormatLabels(s.Spec.Selector)}
}

func externalIP(s *corev1.Service) string {
	ips := slices.Clone(s.Spec.ExternalIPs)
	switch s.Spec.Type {
	case corev1.ServiceTypeExternalName:
		return s.Spec.ExternalName
	case corev1.ServiceTypeLoadBalancer:
		var given []string
		for _, in := range s.Status.LoadBalancer.Ingress {
			if in.IP != "" {
				given = append(given, in.IP)
			} else if in.Hostname != "" {
				given = append(given, in.Hostname)
			}
		}
		slices.Sort(given)
		if ips = append(given, ips...); len(ips) == 0 {
			return "<pending>"
		}
	}
	return builder.OrNone(strings.Join(ips, ","))
}
