package criconfig

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// signalPrefix precedes the names of signals in CRI.
const signalPrefix = "SIGNAL_"

// Replacers between the names of real-time signals in the API and in CRI.
var (
	toCRISignal   = strings.NewReplacer("RTMIN+", "RTMINPLUS", "RTMAX-", "RTMAXMINUS")
	fromCRISignal = strings.NewReplacer("RTMINPLUS", "RTMIN+", "RTMAXMINUS", "RTMAX-")
)

// signalToCRI converts a stop signal of the API to CRI. It returns SIGNAL_RUNTIME_DEFAULT for a
// signal that CRI does not have.
func signalToCRI(signal v1.Signal) cri.Signal {
	return cri.Signal(cri.Signal_value[signalPrefix+toCRISignal.Replace(string(signal))])
}

// SignalFromCRI converts a stop signal of CRI to the API. It returns nil for
// SIGNAL_RUNTIME_DEFAULT, which means that the runtime does not report the signal.
func SignalFromCRI(signal cri.Signal) *v1.Signal {
	if signal == cri.Signal_SIGNAL_RUNTIME_DEFAULT {
		return nil
	}
	return new(v1.Signal(fromCRISignal.Replace(strings.TrimPrefix(signal.String(), signalPrefix))))
}

// ContainerUser converts the user of a container's first process from CRI to the API. It returns
// nil if the runtime does not report the user.
func ContainerUser(user *cri.ContainerUser) *v1.ContainerUser {
	linux := user.GetLinux()
	if linux == nil {
		return nil
	}
	return &v1.ContainerUser{Linux: &v1.LinuxContainerUser{UID: linux.GetUid(), GID: linux.GetGid(),
		SupplementalGroups: slices.Clone(linux.GetSupplementalGroups())}}
}
