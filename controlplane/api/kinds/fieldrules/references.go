package fieldrules

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxDriverName is the maximum length that CSI allows for the name in GetPluginInfoResponse.
const maxDriverName = 63

// ValidateDriverName returns the errors in the name of a CSI driver or of a device driver.
func ValidateDriverName(name string, fldPath *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	var errs field.ErrorList
	if len(name) > maxDriverName {
		errs = append(errs, field.TooLong(fldPath, name, maxDriverName))
	}
	return append(errs, InvalidErrors(fldPath, name, validation.IsDNS1123Subdomain(strings.ToLower(name)))...)
}

// ValidateProtocol returns an error if a protocol is not TCP, UDP or SCTP.
func ValidateProtocol(protocol corev1.Protocol, fldPath *field.Path) field.ErrorList {
	return ValidateOneOf(protocol, fldPath, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

// ValidatePortNumOrName returns the errors in a port number or in the name of a container port.
func ValidatePortNumOrName(port intstr.IntOrString, fldPath *field.Path) field.ErrorList {
	if port.Type == intstr.String {
		return InvalidErrors(fldPath, port.StrVal, validation.IsValidPortName(port.StrVal))
	}
	return InvalidErrors(fldPath, port.IntVal, validation.IsValidPortNum(int(port.IntVal)))
}

// ValidateSelector returns the errors in a label selector.
func ValidateSelector(selector *metav1.LabelSelector, fldPath *field.Path) field.ErrorList {
	if selector == nil {
		return nil
	}
	return metavalidation.ValidateLabelSelector(selector, metavalidation.LabelSelectorValidationOptions{}, fldPath)
}
