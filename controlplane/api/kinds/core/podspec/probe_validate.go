package podspec

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// validateHealth validates hooks and probes. Init containers other than sidecars may have neither.
func validateHealth(c *corev1.Container, role containerRole, s *corev1.PodSpec, at *field.Path) field.ErrorList {
	if role == initial {
		return fieldrules.ForbidSet(at, "may not be set for init containers without restartPolicy=Always",
			map[string]bool{
				"lifecycle": c.Lifecycle != nil, "livenessProbe": c.LivenessProbe != nil,
				"readinessProbe": c.ReadinessProbe != nil, "startupProbe": c.StartupProbe != nil,
			})
	}
	var errs field.ErrorList
	if l := c.Lifecycle; l != nil {
		if l.PostStart != nil {
			errs = append(errs, validateHook(l.PostStart, s.TerminationGracePeriodSeconds, at.Child("lifecycle", "postStart"))...)
		}
		if l.PreStop != nil {
			errs = append(errs, validateHook(l.PreStop, s.TerminationGracePeriodSeconds, at.Child("lifecycle", "preStop"))...)
		}
		errs = append(errs, validateStopSignal(l.StopSignal, s.OS, at.Child("lifecycle", "stopSignal"))...)
	}
	errs = append(errs, validateProbe(c.LivenessProbe, true, at.Child("livenessProbe"))...)
	errs = append(errs, validateProbe(c.ReadinessProbe, false, at.Child("readinessProbe"))...)
	errs = append(errs, validateProbe(c.StartupProbe, true, at.Child("startupProbe"))...)
	if p := c.ReadinessProbe; p != nil && p.TerminationGracePeriodSeconds != nil {
		errs = append(errs, field.Invalid(at.Child("readinessProbe", "terminationGracePeriodSeconds"), *p.TerminationGracePeriodSeconds,
			"must not be set for readinessProbes"))
	}
	return errs
}

// validateProbe validates a probe. With once, successThreshold must be 1.
func validateProbe(p *corev1.Probe, once bool, at *field.Path) field.ErrorList {
	if p == nil {
		return nil
	}
	var errs field.ErrorList
	errs = append(errs, validateHandler(handlers{p.Exec, p.HTTPGet, p.TCPSocket, p.GRPC, nil}, nil, at)...)
	errs = append(errs, fieldrules.NonNegative(p.InitialDelaySeconds, at.Child("initialDelaySeconds"))...)
	errs = append(errs, fieldrules.NonNegative(p.TimeoutSeconds, at.Child("timeoutSeconds"))...)
	errs = append(errs, fieldrules.NonNegative(p.PeriodSeconds, at.Child("periodSeconds"))...)
	errs = append(errs, fieldrules.NonNegative(p.SuccessThreshold, at.Child("successThreshold"))...)
	errs = append(errs, fieldrules.NonNegative(p.FailureThreshold, at.Child("failureThreshold"))...)
	if once && p.SuccessThreshold != 1 {
		errs = append(errs, field.Invalid(at.Child("successThreshold"), p.SuccessThreshold, "must be 1"))
	}
	if g := p.TerminationGracePeriodSeconds; g != nil && *g <= 0 {
		errs = append(errs, field.Invalid(at.Child("terminationGracePeriodSeconds"), *g, "must be greater than 0"))
	}
	return errs
}

// validateHook validates a lifecycle hook. grace is the pod's grace period, which a sleep may not
// exceed; nil if the pod's is invalid.
func validateHook(h *corev1.LifecycleHandler, grace *int64, at *field.Path) field.ErrorList {
	return validateHandler(handlers{h.Exec, h.HTTPGet, h.TCPSocket, nil, h.Sleep}, grace, at)
}

// handlers are the possible actions of a probe or a lifecycle hook.
type handlers struct {
	exec  *corev1.ExecAction
	http  *corev1.HTTPGetAction
	tcp   *corev1.TCPSocketAction
	grpc  *corev1.GRPCAction
	sleep *corev1.SleepAction
}

// validateHandler validates the first action that is set, and returns errors for further ones.
func validateHandler(h handlers, grace *int64, at *field.Path) field.ErrorList {
	first, errs := FirstMember([]NamedSource{{"exec", h.exec != nil}, {"httpGet", h.http != nil}, {"tcpSocket", h.tcp != nil},
		{"grpc", h.grpc != nil}, {"sleep", h.sleep != nil}}, "handler", at)
	switch first {
	case "":
		errs = append(errs, field.Required(at, "must specify a handler type"))
	case "exec":
		if len(h.exec.Command) == 0 {
			errs = append(errs, field.Required(at.Child("exec", "command"), ""))
		}
	case "httpGet":
		http := h.http
		here := at.Child("httpGet")
		if http.Path == "" {
			errs = append(errs, field.Required(here.Child("path"), ""))
		}
		errs = append(errs, fieldrules.ValidatePortNumOrName(http.Port, here.Child("port"))...)
		errs = append(errs, fieldrules.OneOf(http.Scheme, here.Child("scheme"), corev1.URISchemeHTTP,
			corev1.URISchemeHTTPS)...)
		for _, h := range http.HTTPHeaders {
			errs = append(errs, fieldrules.Invalid(here.Child("httpHeaders"), h.Name,
				utilvalidation.IsHTTPHeaderName(h.Name))...)
		}
	case "tcpSocket":
		errs = append(errs, fieldrules.ValidatePortNumOrName(h.tcp.Port, at.Child("tcpSocket", "port"))...)
	case "grpc":
		errs = append(errs, fieldrules.Invalid(at.Child("grpc", "port"), h.grpc.Port,
			utilvalidation.IsValidPortNum(int(h.grpc.Port)))...)
		if m := h.grpc.Mode; m != nil {
			errs = append(errs, fieldrules.OneOf(*m, at.Child("grpc", "mode"), corev1.GRPCProbeModePlaintext,
				corev1.GRPCProbeModeTLS)...)
		}
	case "sleep":
		if n := h.sleep.Seconds; grace != nil && (n < 0 || n > *grace) {
			errs = append(errs, field.Invalid(at.Child("sleep"), n,
				fmt.Sprintf("must be non-negative and less than terminationGracePeriodSeconds (%d)", *grace)))
		}
	}
	return errs
}
