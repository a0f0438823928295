package gateway

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/ingressproxy/gateway"
)

// Namespace is the namespace of the proxy pods of Gateways.
const Namespace = "keelson-entry"

const (
	// ofLabel is a label of all objects of a proxy. Its value is the common name of these objects.
	ofLabel = "keelson.dev/gateway"
	// gatewayNote is an annotation of the objects of a proxy: its Gateway, as namespace/name.
	// madeOf is an annotation with a digest of the specification with which the object was written.
	gatewayNote = "keelson.dev/for-gateway"
	madeOf      = "keelson.dev/made-of"
	// statusPort is the port of a proxy's readiness endpoint. No listener of a Gateway may use it.
	statusPort = 10254
	replicas   = 2
)

// nameOf returns the name of the objects of the proxy for a Gateway. It is a DNS label, while the
// name of the Gateway may be longer.
func nameOf(namespace, name string) string {
	sum := sha256.Sum256([]byte(namespace + "/" + name))
	head := []byte(name)
	for i, c := range head {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			head[i] = '-'
		}
	}
	return "gw-" + string(head[:min(len(head), 40)]) + "-" + hex.EncodeToString(sum[:5])
}

// proxyObjects returns the objects of the proxy for Gateway g, which listens on ports, including
// the Secret with its certificates.
func proxyObjects(g *gateway.Gateway, ports []int32, image string, certificates map[string][]byte) []api.Object {
	o := g.Object
	name := nameOf(o.Namespace, o.Name)
	selector := map[string]string{ofLabel: name}
	labels, notes := map[string]string{}, map[string]string{}
	if i := o.Spec.Infrastructure; i != nil {
		for k, v := range i.Labels {
			labels[string(k)] = string(v)
		}
		for k, v := range i.Annotations {
			notes[string(k)] = string(v)
		}
	}
	labels[ofLabel] = name
	labels[gw.GatewayNameLabelKey] = labelValue(o.Name)
	labels[gw.GatewayClassNameLabelKey] = labelValue(string(o.Spec.GatewayClassName))
	notes[gatewayNote] = o.Namespace + "/" + o.Name
	meta := func() metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: Namespace, Name: name, Labels: maps.Clone(labels),
			Annotations: maps.Clone(notes)}
	}
	service := &corev1.Service{ObjectMeta: meta(), Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, Selector: selector, LoadBalancerIP: g.Address(),
	}}
	var open []corev1.ContainerPort
	for _, p := range ports {
		port := corev1.ServicePort{Name: fmt.Sprint("port-", p), Port: p, TargetPort: intstr.FromInt32(p),
			Protocol: corev1.ProtocolTCP}
		service.Spec.Ports = append(service.Spec.Ports, port)
		open = append(open, corev1.ContainerPort{Name: fmt.Sprint("port-", p), ContainerPort: p,
			Protocol: corev1.ProtocolTCP})
	}
	one, yes, no, grace := intstr.FromInt32(1), true, false, int64(45)
	user := int64(65534)
	get := func(path string) corev1.ProbeHandler {
		return corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromInt32(statusPort)}}
	}
	out := []api.Object{
		&corev1.ServiceAccount{ObjectMeta: meta()},
		service,
		&policyv1.PodDisruptionBudget{ObjectMeta: meta(), Spec: policyv1.PodDisruptionBudgetSpec{
			MaxUnavailable: &one, Selector: &metav1.LabelSelector{MatchLabels: selector}}},
		&corev1.Secret{ObjectMeta: meta(), Type: corev1.SecretTypeOpaque, Data: certificates},
	}
	count := int32(replicas)
	pod := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: maps.Clone(labels), Annotations: maps.Clone(notes)},
		Spec: corev1.PodSpec{
			ServiceAccountName: name, TerminationGracePeriodSeconds: &grace,
			// Listeners may use ports below 1024.
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &user, RunAsGroup: &user,
				FSGroup:        &user,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
				Sysctls:        []corev1.Sysctl{{Name: "net.ipv4.ip_unprivileged_port_start", Value: "0"}}},
			Volumes: []corev1.Volume{{Name: "certificates",
				VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name}}}},
			TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: corev1.LabelHostname,
				WhenUnsatisfiable: corev1.ScheduleAnyway, LabelSelector: &metav1.LabelSelector{MatchLabels: selector}}},
			Containers: []corev1.Container{{
				Name: "entry", Image: image, ImagePullPolicy: corev1.PullIfNotPresent,
				Env:  []corev1.EnvVar{{Name: "GOMEMLIMIT", Value: "900MiB"}},
				Args: []string{"--gateway", o.Namespace + "/" + o.Name, "--certificates", "/certificates"},
				Ports: append(open, corev1.ContainerPort{Name: "status", ContainerPort: statusPort,
					Protocol: corev1.ProtocolTCP}),
				VolumeMounts: []corev1.VolumeMount{{Name: "certificates", MountPath: "/certificates", ReadOnly: true}},
				Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"),
						corev1.ResourceMemory: resource.MustParse("64Mi")},
					Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")}},
				ReadinessProbe: &corev1.Probe{ProbeHandler: get("/readyz"), PeriodSeconds: 2},
				LivenessProbe: &corev1.Probe{ProbeHandler: get("/healthz"), PeriodSeconds: 10, FailureThreshold: 6,
					TimeoutSeconds: 5},
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
			}},
		},
	}
	out = append(out, &appsv1.Deployment{ObjectMeta: meta(), Spec: appsv1.DeploymentSpec{Replicas: &count,
		Selector: &metav1.LabelSelector{MatchLabels: selector}, Template: pod}})
	for _, o := range out {
		notes := o.GetAnnotations()
		notes[madeOf] = specDigest(o)
		o.SetAnnotations(notes)
	}
	return out
}

// labelValue returns a name in a form that is valid as a label value: shortened if it is too long.
func labelValue(name string) string {
	if len(name) <= 63 {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return name[:52] + "-" + hex.EncodeToString(sum[:5])
}

// specDigest returns a digest of all fields of object o.
func specDigest(o api.Object) string {
	data, err := json.Marshal(o)
	if err != nil {
		panic("gateway: " + err.Error()) // these types always encode
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:8])
}
