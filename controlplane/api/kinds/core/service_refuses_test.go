package core_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F38: the fields of a Service that depend on its type, its addresses and its families.
func TestServiceFieldsByType(t *testing.T) {
	svc := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	const external = "may not be set for ExternalName services"
	const balancer = "may only be used when `type` is 'LoadBalancer'"
	kindstest.CheckRefused[*corev1.Service](t,
		kindstest.BadObject{Text: svc("type: ExternalName, externalName: example.com."), Want: ""},
		kindstest.BadObject{Text: svc("type: ExternalName, externalName: ."),
			Want: "spec.externalName: Required value"},
		kindstest.BadObject{Text: svc("type: ExternalName, externalName: A."),
			Want: kindstest.InvalidText("spec.externalName", "A", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: svc("type: ExternalName, externalName: a, clusterIPs: [10.96.0.1], ipFamilies: " +
			"[IPv4], ipFamilyPolicy: SingleStack"),
			Want: "spec.clusterIPs: Forbidden: " + external + "\nspec.ipFamilies: Forbidden: " + external +
				"\nspec.ipFamilyPolicy: Forbidden: " + external},
		kindstest.BadObject{Text: svc("ports: [{port: 80}], loadBalancerClass: a/b, loadBalancerSourceRanges: " +
			"[10.0.0.0/8], allocateLoadBalancerNodePorts: true"),
			Want: "spec.LoadBalancerSourceRanges: Forbidden: " + balancer +
				"\nspec.allocateLoadBalancerNodePorts: Forbidden: " + balancer +
				"\nspec.loadBalancerClass: Forbidden: " + balancer},
		kindstest.BadObject{Text: svc("type: LoadBalancer, ports: [{port: 80}], loadBalancerClass: /b"),
			Want: kindstest.InvalidText("spec.loadBalancerClass", "/b", "prefix part must be non-empty")},
		kindstest.BadObject{Text: svc("ports: [{port: 80, appProtocol: /b}]"),
			Want: kindstest.InvalidText("spec.ports[0].appProtocol", "/b", "prefix part must be non-empty")},
		kindstest.BadObject{Text: svc("ports: [{port: 80}], clusterIPs: [10.96.0.1]"),
			Want: "spec.clusterIPs: Invalid value: [\"10.96.0.1\"]: must be empty when `clusterIP` is not specified"},
		kindstest.BadObject{Text: svc("ports: [{port: 80}], externalIPs: [127.0.0.1, 'fe80::1', 0.0.0.0, 224.0.0.1]"),
			Want: kindstest.InvalidText("spec.externalIPs[0]", "127.0.0.1",
				"may not be in the loopback range (127.0.0.0/8, ::1/128)") + "\n" +
				kindstest.InvalidText("spec.externalIPs[1]", "fe80::1",
					"may not be in the link-local range (169.254.0.0/16, fe80::/10)") + "\n" +
				kindstest.InvalidText("spec.externalIPs[2]", "0.0.0.0", "may not be unspecified (0.0.0.0)") + "\n" +
				kindstest.InvalidText("spec.externalIPs[3]", "224.0.0.1",
					"may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)")},
		kindstest.BadObject{Text: svc("type: LoadBalancer, ports: [{port: 80}], loadBalancerSourceRanges: [' " +
			"10.0.0.0/8 ']"), Want: ""},
		kindstest.BadObject{Text: "{metadata: {name: a, annotations: " +
			"{service.beta.kubernetes.io/load-balancer-source-ranges: x}}, spec: {ports: [{port: 80}]}}",
			Want: "metadata.annotations[service.beta.kubernetes.io/load-balancer-source-ranges]: Forbidden: " +
				balancer + "\n" +
				kindstest.InvalidText("metadata.annotations[service.beta.kubernetes.io/load-balancer-source-ranges]",
					"x", "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)")},
		kindstest.BadObject{Text: svc("ports: [{port: 80}], externalTrafficPolicy: Local"),
			Want: kindstest.InvalidText("spec.externalTrafficPolicy", "Local",
				"may only be set for externally-accessible services")},
		kindstest.BadObject{Text: svc("ports: [{port: 80}], externalIPs: [192.0.2.1], externalTrafficPolicy: Local"),
			Want: ""},
		kindstest.BadObject{Text: svc("ports: [{port: 80}], clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1, 10.96.0.2]"),
			Want: `spec.clusterIPs: Invalid value: ["10.96.0.1","10.96.0.2"]: may specify no more than one IP ` +
				`for each IP family`},
		kindstest.BadObject{Text: svc(`ports: [{port: 80}], clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1, ` +
			`"fd00::1", "fd00::2"]`),
			Want: `spec.clusterIPs: Invalid value: ["10.96.0.1","fd00::1","fd00::2"]: may only hold up to 2 values`},
		kindstest.BadObject{Text: svc("ports: [{port: 80}], clusterIP: None, clusterIPs: [None, 10.96.0.1]"),
			Want: `spec.clusterIPs: Invalid value: ["None","10.96.0.1"]: 'None' must be the first and only value`},
		kindstest.BadObject{Text: svc("ports: [{port: 80}], clusterIP: 10.96.0.1, ipFamilies: [IPv6, IPv6]"),
			Want: `spec.ipFamilies[1]: Duplicate value: "IPv6"` + "\n" +
				kindstest.InvalidText("spec.clusterIPs[0]", "10.96.0.1",
					"expected an IPv6 value as indicated by `ipFamilies[0]`")},
	)
}

// F38: an update keeps addresses and the class of the load balancer, and a change of type drops the fields of the old type.
func TestServiceChanges(t *testing.T) {
	const dual = "{metadata: {name: a}, spec: {clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1, 'fd00::1'], " +
		"ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack, ports: [{port: 80}]}}"
	kindstest.CheckChanges(t, dual,
		// A client that does not know clusterIPs changes clusterIP alone.
		kindstest.Change[*corev1.Service]{Change: func(s *corev1.Service) {
			s.Spec.ClusterIP = "10.96.0.2"
		}, Generation: 1,
			Want: `spec.clusterIPs[0]: Invalid value: ["10.96.0.2"]: may not change once set` + "\n" +
				`spec.ipFamilyPolicy: Invalid value: "RequireDualStack": must be set to 'SingleStack' when releasing ` +
				`the secondary clusterIP`},
		kindstest.Change[*corev1.Service]{Change: func(s *corev1.Service) {
			s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil
		}},
		kindstest.Change[*corev1.Service]{Change: func(s *corev1.Service) {
			s.Spec.IPFamilies = []corev1.IPFamily{"IPv6", "IPv4"}
		}, Generation: 1,
			Want: "spec.clusterIPs[0]: Invalid value: \"10.96.0.1\": expected an IPv6 value as indicated by " +
				"`ipFamilies[0]`\n" +
				"spec.clusterIPs[1]: Invalid value: \"fd00::1\": expected an IPv4 value as indicated by " +
				"`ipFamilies[1]`\n" +
				`spec.ipFamilies[0]: Invalid value: ["IPv6","IPv4"]: may not change once set` + "\n" +
				`spec.ipFamilies[0]: Invalid value: ["IPv6","IPv4"]: may not change once set`},
		kindstest.Change[*corev1.Service]{Change: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = "ExternalName", "b."
		}, Generation: 1},
	)
	const balanced = "{metadata: {name: a}, spec: {type: LoadBalancer, loadBalancerClass: example.com/a, " +
		"externalTrafficPolicy: Local, " +
		"healthCheckNodePort: 30100, clusterIP: 10.96.0.1, ports: [{port: 80, nodePort: 30080}]}}"
	class := func(name string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			if s.Spec.LoadBalancerClass = nil; name != "" {
				s.Spec.LoadBalancerClass = &name
			}
		}
	}
	kindstest.CheckChanges(t, balanced,
		kindstest.Change[*corev1.Service]{Change: class("example.com/b"), Generation: 1,
			Want: kindstest.InvalidText("spec.loadBalancerClass", "example.com/b", "may not change once set")},
		kindstest.Change[*corev1.Service]{Change: class(""), Generation: 1,
			Want: "spec.loadBalancerClass: Invalid value: null: may not change once set"},
		kindstest.Change[*corev1.Service]{Change: func(s *corev1.Service) {
			s.Spec.HealthCheckNodePort = 30101
		}, Generation: 1,
			Want: "spec.healthCheckNodePort: Forbidden: field is immutable"},
		kindstest.Change[*corev1.Service]{Change: func(s *corev1.Service) { s.Spec.Type = "ClusterIP" }, Generation: 1},
		kindstest.Change[*corev1.Service]{Change: func(s *corev1.Service) {
			s.Spec.Type, s.Spec.Ports[0].NodePort = "ClusterIP", 30081
		}, Generation: 1,
			Want: "spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"},
		kindstest.Change[*corev1.Service]{Change: func(s *corev1.Service) {
			s.Spec.Type = "NodePort"
			class("example.com/b")(s)
		}, Generation: 1, Want: "spec.loadBalancerClass: Forbidden: may only be used when `type` is 'LoadBalancer'"},
	)
	kindstest.CheckChanges(t,
		"{metadata: {name: a}, spec: {type: LoadBalancer, clusterIP: 10.96.0.1, ports: [{port: 80}]}}",
		kindstest.Change[*corev1.Service]{Change: class("example.com/b"), Generation: 1,
			Want: kindstest.InvalidText("spec.loadBalancerClass", "example.com/b", "may not change once set")})
}

// F38: the addresses that a load balancer reports.
func TestServiceStatus(t *testing.T) {
	report := func(in ...corev1.LoadBalancerIngress) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = in }
	}
	vip, other := corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPMode("Other")
	at := "status.loadBalancer.ingress[0]."
	kindstest.CheckChanges(t,
		"{metadata: {name: a}, spec: {type: LoadBalancer, clusterIP: 10.96.0.1, ports: [{port: 80}]}}",
		kindstest.Change[*corev1.Service]{Sub: "status",
			Change: report(corev1.LoadBalancerIngress{IP: "1.2.3.4", IPMode: &vip, Hostname: "a.b"})},
		kindstest.Change[*corev1.Service]{Sub: "status",
			Change: report(corev1.LoadBalancerIngress{IP: "1.2.3.4", IPMode: &other}),
			Want:   at + `ipMode: Unsupported value: "Other": supported values: "Proxy", "VIP"`},
		// the mode is VIP
		kindstest.Change[*corev1.Service]{Sub: "status", Change: report(corev1.LoadBalancerIngress{IP: "1.2.3.4"})},
		kindstest.Change[*corev1.Service]{Sub: "status",
			Change: report(corev1.LoadBalancerIngress{Hostname: "1.2.3.4", IPMode: &vip}),
			Want: at + "ipMode: Forbidden: may not be specified when `ip` is not set\n" +
				kindstest.InvalidText(at+"hostname", "1.2.3.4", "must be a DNS name, not an IP address")},
	)
	kindstest.CheckChanges(t, "{metadata: {name: a}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}",
		kindstest.Change[*corev1.Service]{Sub: "status", Change: report(corev1.LoadBalancerIngress{Hostname: "a"}),
			Want: "status.loadBalancer.ingress: Forbidden: may only be used when `spec.type` is 'LoadBalancer'"})
}
