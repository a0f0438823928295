package ingress

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/ingressproxy/ingress"
)

const (
	// Namespace is the namespace of the proxies, and Account their ServiceAccount: the subject of
	// the default ClusterRoleBinding "keelson:ingress-proxy".
	Namespace = "keelson-entry"
	Account   = "entry"
	// madeAnnotation holds a digest of the specification with which this controller wrote an
	// object. Changes by users are kept until that specification changes.
	madeAnnotation = "keelson.dev/made-as"
	// classLabel is on all objects of the proxies of an IngressClass. Its value is the class.
	classLabel = "keelson.dev/ingress-class"
	// pairsFolder is the directory in the proxies' containers in which the TLS key pairs are
	// mounted.
	pairsFolder = "/certificates"
)

// ProxyObjects holds the objects of the proxies of one IngressClass. They have the name of the
// class, and the class owns them, so that they are deleted with it.
type ProxyObjects struct {
	Deployment *appsv1.Deployment
	Service    *corev1.Service
	Budget     *policyv1.PodDisruptionBudget // nil if there is a single replica
}

// PlanPairs returns the Secrets with TLS key pairs that the proxies of a class mount. given holds
// the contents of each Secret: data by file name. The result for a Secret without files is nil.
func PlanPairs(class *networkingv1.IngressClass, given [ingress.MaxShards]map[string][]byte) (
	out [ingress.MaxShards]*corev1.Secret,
) {
	for i, data := range given {
		if len(data) > 0 {
			meta := metaOf(class)
			meta.Name = ingress.ShardName(class.Name, i)
			out[i] = &corev1.Secret{ObjectMeta: meta, Type: corev1.SecretTypeOpaque, Data: data}
		}
	}
	return out
}

func metaOf(class *networkingv1.IngressClass) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: Namespace, Name: class.Name, Labels: labelsOf(class.Name),
		OwnerReferences: []metav1.OwnerReference{
			*metav1.NewControllerRef(class, networkingv1.SchemeGroupVersion.WithKind("IngressClass"))}}
}

func labelsOf(class string) map[string]string {
	return map[string]string{"app.kubernetes.io/name": "keelson-entry", classLabel: class}
}

// PlanProxy returns the objects of the proxies of a class. nodes is the number of nodes in the
// cluster: with more than one node there are two replicas.
func PlanProxy(class *networkingv1.IngressClass, image string, nodes int) ProxyObjects {
	labels, meta := labelsOf(class.Name), metaOf(class)
	selector := &metav1.LabelSelector{MatchLabels: labels}
	replicas := int32(1)
	if nodes > 1 {
		replicas = 2
	}
	m := ProxyObjects{
		Deployment: &appsv1.Deployment{ObjectMeta: *meta.DeepCopy(), Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: selector,
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: podSpec(class.Name, image, selector)},
		}},
		Service: &corev1.Service{ObjectMeta: *meta.DeepCopy(), Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, Selector: labels, Ports: []corev1.ServicePort{
				{Name: "http", Port: ingress.HTTPPort, TargetPort: intstr.FromInt32(ingress.HTTPPort),
					Protocol: corev1.ProtocolTCP},
				{Name: "https", Port: ingress.HTTPSPort, TargetPort: intstr.FromInt32(ingress.HTTPSPort),
					Protocol: corev1.ProtocolTCP},
			},
		}},
	}
	if replicas > 1 {
		one := intstr.FromInt32(1)
		m.Budget = &policyv1.PodDisruptionBudget{ObjectMeta: *meta.DeepCopy(),
			Spec: policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &one, Selector: selector}}
	}
	specDigest(m.Deployment, m.Deployment.Spec)
	specDigest(m.Service, m.Service.Spec)
	if m.Budget != nil {
		specDigest(m.Budget, m.Budget.Spec)
	}
	return m
}

func specDigest(o api.Object, spec any) {
	text, err := json.Marshal(spec)
	if err != nil {
		panic("ingress: encoding a generated spec as JSON: " + err.Error())
	}
	o.SetAnnotations(map[string]string{madeAnnotation: fmt.Sprintf("%x", sha256.Sum256(text))[:16]})
}

// podSpec returns the spec of a proxy pod of a class. The pod has no privileges. A sysctl of its
// network namespace permits it to listen on ports below 1024.
func podSpec(class, image string, selector *metav1.LabelSelector) corev1.PodSpec {
	no, yes, grace := false, true, int64(45)
	nobody := int64(65534)
	get := func(path string) corev1.ProbeHandler {
		return corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromString("status")}}
	}
	given := &corev1.ProjectedVolumeSource{}
	for i := range ingress.MaxShards {
		given.Sources = append(given.Sources, corev1.VolumeProjection{Secret: &corev1.SecretProjection{
			LocalObjectReference: corev1.LocalObjectReference{Name: ingress.ShardName(class, i)}, Optional: &yes}})
	}
	return corev1.PodSpec{
		ServiceAccountName:            Account,
		TerminationGracePeriodSeconds: &grace,
		SecurityContext: &corev1.PodSecurityContext{
			RunAsNonRoot: &yes, RunAsUser: &nobody, RunAsGroup: &nobody, FSGroup: &nobody,
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			Sysctls:        []corev1.Sysctl{{Name: "net.ipv4.ip_unprivileged_port_start", Value: "0"}},
		},
		TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{
			MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.ScheduleAnyway,
			LabelSelector: selector,
		}},
		Volumes: []corev1.Volume{{Name: "pairs", VolumeSource: corev1.VolumeSource{Projected: given}}},
		Containers: []corev1.Container{{
			Name: "entry", Image: image, ImagePullPolicy: corev1.PullIfNotPresent,
			Args:         []string{"--ingress-class=" + class, "--certificates=" + pairsFolder},
			VolumeMounts: []corev1.VolumeMount{{Name: "pairs", MountPath: pairsFolder, ReadOnly: true}},
			Env:          []corev1.EnvVar{{Name: "GOMEMLIMIT", Value: "900MiB"}},
			Ports: []corev1.ContainerPort{
				{Name: "http", ContainerPort: ingress.HTTPPort}, {Name: "https", ContainerPort: ingress.HTTPSPort},
				{Name: "status", ContainerPort: 10254},
			},
			Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"),
					corev1.ResourceMemory: resource.MustParse("64Mi")},
				Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")},
			},
			ReadinessProbe: &corev1.Probe{ProbeHandler: get("/readyz"), PeriodSeconds: 2},
			LivenessProbe: &corev1.Probe{ProbeHandler: get("/healthz"), PeriodSeconds: 10, FailureThreshold: 6,
				TimeoutSeconds: 5},
			SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
				Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			},
		}},
	}
}

// Addresses returns the load balancer status of Ingresses: the addresses of s, the Service of the
// proxies.
func Addresses(s *corev1.Service) []networkingv1.IngressLoadBalancerIngress {
	var out []networkingv1.IngressLoadBalancerIngress
	for _, in := range s.Status.LoadBalancer.Ingress {
		entry := networkingv1.IngressLoadBalancerIngress{IP: in.IP, Hostname: in.Hostname}
		for _, p := range in.Ports {
			entry.Ports = append(entry.Ports, networkingv1.IngressPortStatus{Port: p.Port, Protocol: p.Protocol,
				Error: p.Error})
		}
		out = append(out, entry)
	}
	return out
}
