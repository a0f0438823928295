package podspec

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// validateHealth validates the lifecycle hooks and probes of a container. Init containers other
// than sidecars may have neither.
func validateHealth(c *corev1.Container, role containerRole, s *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	if role == initial {
		return fieldrules.ForbidSetFields(fldPath, "may not be set for init containers without restartPolicy=Always",
			map[string]bool{
				"lifecycle": c.Lifecycle != nil, "livenessProbe": c.LivenessProbe != nil,
				"readinessProbe": c.ReadinessProbe != nil, "startupProbe": c.StartupProbe != nil,
			})
	}
	var errs field.ErrorList
	if l := c.Lifecycle; l != nil {
		if l.PostStart != nil {
			errs = append(errs, validateHook(l.PostStart, s.TerminationGracePeriodSeconds,
				fldPath.Child("lifecycle", "postStart"))...)
		}
		if l.PreStop != nil {
			errs = append(errs, validateHook(l.PreStop, s.TerminationGracePeriodSeconds,
				fldPath.Child("lifecycle", "preStop"))...)
		}
		errs = append(errs, validateStopSignal(l.StopSignal, s.OS, fldPath.Child("lifecycle", "stopSignal"))...)
	}
	errs = append(errs, validateProbe(c.LivenessProbe, true, fldPath.Child("livenessProbe"))...)
	errs = append(errs, validateProbe(c.ReadinessProbe, false, fldPath.Child("readinessProbe"))...)
	errs = append(errs, validateProbe(c.StartupProbe, true, fldPath.Child("startupProbe"))...)
	if p := c.ReadinessProbe; p != nil && p.TerminationGracePeriodSeconds != nil {
		errs = append(errs, field.Invalid(fldPath.Child("readinessProbe", "terminationGracePeriodSeconds"),
			*p.TerminationGracePeriodSeconds,
			"must not be set for readinessProbes"))
	}
	return errs
}

// validateProbe validates a probe. If singleSuccess is true, successThreshold must be 1.
func validateProbe(p *corev1.Probe, singleSuccess bool, fldPath *field.Path) field.ErrorList {
	if p == nil {
		return nil
	}
	var errs field.ErrorList
	errs = append(errs, validateHandler(handlers{p.Exec, p.HTTPGet, p.TCPSocket, p.GRPC, nil}, nil, fldPath)...)
	errs = append(errs, fieldrules.ValidateNonNegative(p.InitialDelaySeconds, fldPath.Child("initialDelaySeconds"))...)
	errs = append(errs, fieldrules.ValidateNonNegative(p.TimeoutSeconds, fldPath.Child("timeoutSeconds"))...)
	errs = append(errs, fieldrules.ValidateNonNegative(p.PeriodSeconds, fldPath.Child("periodSeconds"))...)
	errs = append(errs, fieldrules.ValidateNonNegative(p.SuccessThreshold, fldPath.Child("successThreshold"))...)
	errs = append(errs, fieldrules.ValidateNonNegative(p.FailureThreshold, fldPath.Child("failureThreshold"))...)
	if singleSuccess && p.SuccessThreshold != 1 {
		errs = append(errs, field.Invalid(fldPath.Child("successThreshold"), p.SuccessThreshold, "must be 1"))
	}
	if g := p.TerminationGracePeriodSeconds; g != nil && *g <= 0 {
		errs = append(errs, field.Invalid(fldPath.Child("terminationGracePeriodSeconds"), *g, "must be greater than 0"))
	}
	return errs
}

// validateHook validates a lifecycle hook. gracePeriod is the pod's grace period, which a sleep may
// not exceed. It is nil if the pod's grace period is invalid.
func validateHook(h *corev1.LifecycleHandler, gracePeriod *int64, fldPath *field.Path) field.ErrorList {
	return validateHandler(handlers{h.Exec, h.HTTPGet, h.TCPSocket, nil, h.Sleep}, gracePeriod, fldPath)
}

// handlers are the possible actions of a probe or a lifecycle hook.
type handlers struct {
	exec  *corev1.ExecAction
	http  *corev1.HTTPGetAction
	tcp   *corev1.TCPSocketAction
	grpc  *corev1.GRPCAction
	sleep *corev1.SleepAction
}

// validateHandler validates the first action that is set, and returns an error for each other
// action that is set. gracePeriod is as in validateHook.
func validateHandler(h handlers, gracePeriod *int64, fldPath *field.Path) field.ErrorList {
	first, errs := ValidateOneMember([]NamedSource{{"exec", h.exec != nil}, {"httpGet", h.http != nil},
		{"tcpSocket", h.tcp != nil},
		{"grpc", h.grpc != nil}, {"sleep", h.sleep != nil}}, "handler", fldPath)
	switch first {
	case "":
		errs = append(errs, field.Required(fldPath, "must specify a handler type"))
	case "exec":
		if len(h.exec.Command) == 0 {
			errs = append(errs, field.Required(fldPath.Child("exec", "command"), ""))
		}
	case "httpGet":
		http := h.http
		here := fldPath.Child("httpGet")
		if http.Path == "" {
			errs = append(errs, field.Required(here.Child("path"), ""))
		}
		errs = append(errs, fieldrules.ValidatePortNumOrName(http.Port, here.Child("port"))...)
		errs = append(errs, fieldrules.ValidateOneOf(http.Scheme, here.Child("scheme"), corev1.URISchemeHTTP,
			corev1.URISchemeHTTPS)...)
		for _, h := range http.HTTPHeaders {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("httpHeaders"), h.Name,
				utilvalidation.IsHTTPHeaderName(h.Name))...)
		}
	case "tcpSocket":
		errs = append(errs, fieldrules.ValidatePortNumOrName(h.tcp.Port, fldPath.Child("tcpSocket", "port"))...)
	case "grpc":
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("grpc", "port"), h.grpc.Port,
			utilvalidation.IsValidPortNum(int(h.grpc.Port)))...)
		if m := h.grpc.Mode; m != nil {
			errs = append(errs, fieldrules.ValidateOneOf(*m, fldPath.Child("grpc", "mode"),
				corev1.GRPCProbeModePlaintext,
				corev1.GRPCProbeModeTLS)...)
		}
	case "sleep":
		if n := h.sleep.Seconds; gracePeriod != nil && (n < 0 || n > *gracePeriod) {
			errs = append(errs, field.Invalid(fldPath.Child("sleep"), n,
				fmt.Sprintf("must be non-negative and less than terminationGracePeriodSeconds (%d)", *gracePeriod)))
		}
	}
	return errs
}
