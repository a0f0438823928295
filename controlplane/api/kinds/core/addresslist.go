package core

import (
	"fmt"
	"net"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// shownEndpoints is how many endpoints a row lists before it counts the rest.
const shownEndpoints = 3

// FirstOf lists the first few of all and counts the rest.
func FirstOf(all []string, more, nothing string) string {
	if len(all) == 0 {
		return nothing
	}
	if len(all) <= shownEndpoints {
		return strings.Join(all, ",")
	}
	return strings.Join(all[:shownEndpoints], ",") + fmt.Sprintf(more, len(all)-shownEndpoints)
}

// NonSpecial refuses addresses that mean something else on each machine: nobody is to be sent to them.
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
