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
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Spaces in which Services reserve unique values. At most one Service can have a value of each
// space.
const (
	SpaceClusterIPs = "clusterips" // values such as "10.96.0.10"
	SpaceNodePorts  = "nodeports"  // values such as "TCP-30080"
)

// The smallest and the largest node port.
const (
	MinNodePort = 30000
	MaxNodePort = 32767
)

const clientIPTimeout = int32(3 * 60 * 60) // default timeout of session affinity in seconds, as in Kubernetes

// ServiceKind returns the definition of the kind Service.
func ServiceKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Service", CreateOnUpdate: true, Plural: "services",
		Singular: "service", Short: []string{"svc"}, InAllCategory: true,
		Rule: validation.NameIsDNSLabel,
	}, func(l *corev1.ServiceList) *[]corev1.Service { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(DefaultService)
	k.Writes.OwnedDefault = builder.Default(defaultOwnedService)
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
	k.Commit.Reservations = func(o api.Object) []api.Reservation { return ServiceReservations(o.(*corev1.Service)) }
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Type"),
		builder.StringColumn("Cluster-IP"),
		builder.StringColumn("External-IP"), builder.StringColumn("Port(s)"), builder.AgeColumn,
		builder.WideColumn("Selector"))
	k.Lists.Row = builder.Row(serviceRow)
	k.Lists.Fields = builder.Fields(func(s *corev1.Service) fields.Set {
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

// defaultOwnedService sets those defaults that managedFields attributes to the client. As in
// Kubernetes, a client that sets only clusterIP does not own clusterIPs.
func defaultOwnedService(service *corev1.Service) {
	spec := &service.Spec
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
	defaultIPModes(service)
	if spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	if isExternallyAccessible(spec) {
		builder.SetDefault(&spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	builder.SetDefaultPtr(&spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster)
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		builder.SetDefaultPtr(&spec.AllocateLoadBalancerNodePorts, true)
	}
}

// defaultIPModes sets the missing ipMode of addresses that a load balancer reports. Older
// controllers do not set it.
func defaultIPModes(service *corev1.Service) {
	for i := range service.Status.LoadBalancer.Ingress {
		if in := &service.Status.LoadBalancer.Ingress[i]; in.IP != "" {
			builder.SetDefaultPtr(&in.IPMode, corev1.LoadBalancerIPModeVIP)
		}
	}
}

func usesNodePorts(t corev1.ServiceType) bool {
	return t == corev1.ServiceTypeNodePort || t == corev1.ServiceTypeLoadBalancer
}

// NeedsClusterIP reports whether a Service has its own cluster IP, or must be allocated one.
func NeedsClusterIP(service *corev1.Service) bool {
	return service.Spec.Type != corev1.ServiceTypeExternalName && service.Spec.ClusterIP != corev1.ClusterIPNone
}

// NeedsNodePorts reports whether each port of a Service has a node port, or must be allocated one.
func NeedsNodePorts(service *corev1.Service) bool {
	switch service.Spec.Type {
	case corev1.ServiceTypeNodePort:
		return true
	case corev1.ServiceTypeLoadBalancer:
		return service.Spec.AllocateLoadBalancerNodePorts == nil || *service.Spec.AllocateLoadBalancerNodePorts
	}
	return false
}

// keepAllocated sets values that the client omitted, such as cluster IPs and node ports, to those
// of the stored Service. It also clears values that the new type of the Service cannot have. If the
// client has changed such a value, it is not cleared, so that validation rejects it.
func keepAllocated(obj, stored *corev1.Service) {
	DefaultService(obj)
	SyncClusterIPs(&obj.Spec, &stored.Spec)
	if NeedsClusterIP(obj) && NeedsClusterIP(stored) && obj.Spec.ClusterIP == "" {
		if obj.Spec.ClusterIP = stored.Spec.ClusterIP; len(obj.Spec.ClusterIPs) == 0 {
			obj.Spec.ClusterIPs = slices.Clone(stored.Spec.ClusterIPs)
		}
	}
	if NeedsNodePorts(obj) && usesNodePorts(stored.Spec.Type) {
		keepNodePorts(obj, stored)
	}
	if stored.Spec.Type != corev1.ServiceTypeExternalName && obj.Spec.Type == corev1.ServiceTypeExternalName {
		dropAddresses(&obj.Spec, &stored.Spec)
	}
	if usesNodePorts(stored.Spec.Type) && !usesNodePorts(obj.Spec.Type) && !changesNodePorts(obj, stored) {
		for i := range obj.Spec.Ports {
			obj.Spec.Ports[i].NodePort = 0
		}
	}
	dropBalancing(&obj.Spec, &stored.Spec)
}

// SyncClusterIPs updates clusterIPs from clusterIP if a client that does not know clusterIPs has
// changed only clusterIP. stored is the spec of the stored Service.
func SyncClusterIPs(spec, stored *corev1.ServiceSpec) {
	if spec.ClusterIP != stored.ClusterIP && spec.ClusterIP != "" && slices.Equal(spec.ClusterIPs, stored.ClusterIPs) {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
}

// dropAddresses clears the cluster IPs and IP families of a Service that becomes an ExternalName,
// unless the client has changed them.
func dropAddresses(spec, stored *corev1.ServiceSpec) {
	if spec.ClusterIP == stored.ClusterIP && slices.Equal(spec.ClusterIPs, stored.ClusterIPs) {
		spec.ClusterIP, spec.ClusterIPs = "", nil
	}
	if slices.Equal(spec.IPFamilies, stored.IPFamilies) {
		spec.IPFamilies = nil
	}
	if ptr.Deref(spec.IPFamilyPolicy, "") == ptr.Deref(stored.IPFamilyPolicy, "") {
		spec.IPFamilyPolicy = nil
	}
}

// changesNodePorts reports whether obj specifies a node port that the stored Service does not have.
func changesNodePorts(obj, stored *corev1.Service) bool {
	had := map[int32]bool{0: true}
	for _, p := range stored.Spec.Ports {
		had[p.NodePort] = true
	}
	return slices.ContainsFunc(obj.Spec.Ports, func(p corev1.ServicePort) bool { return !had[p.NodePort] })
}

// dropBalancing clears the load balancer and external traffic fields that the new type of the
// Service does not have.
func dropBalancing(spec, stored *corev1.ServiceSpec) {
	if needsHealthPort(stored) && !needsHealthPort(spec) && spec.HealthCheckNodePort == stored.HealthCheckNodePort {
		spec.HealthCheckNodePort = 0
	}
	if isExternallyAccessible(stored) && !isExternallyAccessible(spec) &&
		spec.ExternalTrafficPolicy == stored.ExternalTrafficPolicy {
		spec.ExternalTrafficPolicy = ""
	}
	if stored.Type != corev1.ServiceTypeLoadBalancer || spec.Type == corev1.ServiceTypeLoadBalancer {
		return
	}
	if ptr.Deref(spec.AllocateLoadBalancerNodePorts, false) == ptr.Deref(stored.AllocateLoadBalancerNodePorts, false) {
		spec.AllocateLoadBalancerNodePorts = nil
	}
	if fieldrules.SemanticEqual(spec.LoadBalancerClass, stored.LoadBalancerClass) {
		spec.LoadBalancerClass = nil
	}
}

// isExternallyAccessible reports whether traffic from outside the cluster can reach the Service.
func isExternallyAccessible(spec *corev1.ServiceSpec) bool {
	return usesNodePorts(spec.Type) || spec.Type == corev1.ServiceTypeClusterIP && len(spec.ExternalIPs) > 0
}

func keepNodePorts(obj, old *corev1.Service) {
	type key struct {
		protocol corev1.Protocol
		port     int32
	}
	previous := map[key]int32{}
	for _, p := range old.Spec.Ports {
		previous[key{p.Protocol, p.Port}] = p.NodePort
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
		kept.NodePort = previous[key{p.Protocol, p.Port}]
		if kept.NodePort != 0 && !taken[nodePortValue(kept)] {
			*p = kept
			taken[nodePortValue(kept)] = true
		}
	}
}

// needsHealthPort reports whether the Service has a separate node port (healthCheckNodePort), with
// which load balancers find the nodes that have endpoints.
func needsHealthPort(spec *corev1.ServiceSpec) bool {
	return spec.Type == corev1.ServiceTypeLoadBalancer &&
		spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

func nodePortValue(p corev1.ServicePort) string {
	return NodePort{Protocol: p.Protocol, Port: p.NodePort}.Value()
}

// ServiceReservations returns the cluster IPs and node ports that a Service reserves.
func ServiceReservations(service *corev1.Service) []api.Reservation {
	var out []api.Reservation
	if NeedsClusterIP(service) {
		for i, ip := range service.Spec.ClusterIPs {
			if ip != "" && ip != corev1.ClusterIPNone {
				out = append(out, api.Reservation{Space: SpaceClusterIPs, Value: ip,
					Field: fmt.Sprintf("spec.clusterIPs[%d]", i)})
			}
		}
		if len(service.Spec.ClusterIPs) == 0 && service.Spec.ClusterIP != "" {
			out = append(out, api.Reservation{Space: SpaceClusterIPs, Value: service.Spec.ClusterIP,
				Field: "spec.clusterIP"})
		}
	}
	for _, p := range NodePorts(service) {
		out = append(out, api.Reservation{Space: SpaceNodePorts, Value: p.Value(), Field: p.Field})
	}
	return out
}

// NodePort is a port of a Service that is open on every node.
type NodePort struct {
	Protocol corev1.Protocol
	Port     int32
	Field    string // path of the port's field in the Service
}

// Value returns the port in the format of reservations: "TCP-30080".
func (p NodePort) Value() string { return fmt.Sprintf("%s-%d", p.Protocol, p.Port) }

// String returns the port for messages: "30080/TCP".
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
	return []any{s.Name, string(s.Spec.Type), builder.ValueOrNone(s.Spec.ClusterIP), externalIP(s),
		builder.ValueOrNone(strings.Join(ports, ",")),
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
	return builder.ValueOrNone(strings.Join(ips, ","))
}
