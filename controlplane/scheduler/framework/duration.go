package framework

import "time"

// TimedPoint is an extension point whose duration is measured. The duration is the time that all
// plugins of the point take for one pod and, at Filter and Score, for all nodes.
type TimedPoint uint8

const (
	TimedPreFilter TimedPoint = iota
	TimedFilter
	TimedPostFilter
	TimedPreScore
	TimedScore // includes NormalizeScore
	TimedReserve
	TimedUnreserve
	TimedPermit
	TimedPreBind
	TimedBind // includes an extender that binds the pod
	TimedPostBind

	// NumTimedPoints is the number of timed points.
	NumTimedPoints
)

// String returns the name of the point in the metrics of kube-scheduler.
func (at TimedPoint) String() string {
	return [NumTimedPoints]string{"PreFilter", "Filter", "PostFilter", "PreScore", "Score", "Reserve",
		"Unreserve", "Permit", "PreBind", "Bind", "PostBind"}[at]
}

// NumCodes is the number of codes of a Status.
const NumCodes = Skip + 1

// String returns the name of the code in kube-scheduler.
func (c Code) String() string {
	return [NumCodes]string{"Success", "Error", "Unschedulable", "UnschedulableAndUnresolvable", "Wait", "Skip"}[c]
}

// DurationObserver receives the durations of the extension points of a Cycle. It must be safe for
// concurrent use.
type DurationObserver interface {
	ObservePoint(at TimedPoint, code Code, d time.Duration)
}

// startPoint returns the current time if the durations of the cycle are observed, and otherwise the
// zero time.
func (c *Cycle) startPoint() time.Time {
	if c.Durations == nil {
		return time.Time{}
	}
	return time.Now()
}

// observePoint reports that the plugins of a point have run since the given time, and the code of
// their result.
func (c *Cycle) observePoint(at TimedPoint, started time.Time, code Code) {
	if c.Durations != nil {
		c.Durations.ObservePoint(at, code, time.Since(started))
	}
}

// codeOfStatus returns the code of a status, which may be nil.
func codeOfStatus(s *Status) Code {
	if s == nil {
		return Success
	}
	return s.Code
}

// codeOfError returns the code of the result of PreFilter, Filter or Score plugins as an error. A
// pod for which no node is left after Filter is not a failure of Filter, as in kube-scheduler.
func codeOfError(err error) Code {
	if err == nil {
		return Success
	}
	if fit, ok := err.(*FitError); ok {
		return fit.code
	}
	return Error
}
