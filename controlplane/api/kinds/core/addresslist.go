package core

import (
	"fmt"
	"net"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// shownEndpoints is the maximum number of endpoints that a row lists before it shows the number of
// the others.
const shownEndpoints = 3

// FirstOf returns the first shownEndpoints elements of all, joined by commas. more is the format
// for the number of the others. nothing is returned for an empty list.
func FirstOf(all []string, more, nothing string) string {
	if len(all) == 0 {
		return nothing
	}
	if len(all) <= shownEndpoints {
		return strings.Join(all, ",")
	}
	return strings.Join(all[:shownEndpoints], ",") + fmt.Sprintf(more, len(all)-shownEndpoints)
}

// NonSpecial returns an error for an address that is not a usable endpoint: unspecified, loopback,
// link-local and multicast addresses.
func NonSpecial(a string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	refuse := func(special bool, why string) {
		if special {
			errs = append(errs, field.Invalid(at, a, why))
		}
	}
	ip := net.ParseIP(a)
	if ip == nil {
		return field.ErrorList{field.Invalid(at, a, "must be a valid IP address")}
	}
	refuse(ip.IsUnspecified(), fmt.Sprintf("may not be unspecified (%v)", a))
	refuse(ip.IsLoopback(), "may not be in the loopback range (127.0.0.0/8, ::1/128)")
	refuse(ip.IsLinkLocalUnicast(), "may not be in the link-local range (169.254.0.0/16, fe80::/10)")
	refuse(ip.IsLinkLocalMulticast(), "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)")
	return errs
}
