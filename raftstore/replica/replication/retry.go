package replication

import (
	"errors"
	"time"

	"github.com/hashicorp/raft"
)

// raft's transport keeps idle connections, and a replica that does not lead may keep them for
// hours. If the machine of a peer has restarted, the idle connections to it are dead. raft requests
// each vote only once. A candidate that requests votes over dead connections would lose its
// election, and a leadership transfer would fail, after a timeout. Such a request is therefore sent
// again over a new connection if the idle connection fails. A vote is also requested again if the
// idle connection gets no response for longer than a voter usually takes. A voter that receives
// both requests gives the same response to both. But a target that receives two TimeoutNow would
// start two elections. A TimeoutNow is therefore not sent again if the first one may still arrive.

// silentAfter is how long the response over an idle connection may take before a new connection is
// used as well. A TimeoutNow is sent again only if the idle connection fails within this time,
// because raft may abandon the transfer later.
const silentAfter = 50 * time.Millisecond

// RequestVote implements raft.Transport.
func (t *PatientTransport) RequestVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestVoteRequest,
	resp *raft.RequestVoteResponse) error {
	return callBoth(resp, func(over *raft.NetworkTransport, resp *raft.RequestVoteResponse) error {
		return over.RequestVote(id, target, args, resp)
	}, t.NetworkTransport, t.Unpooled)
}

// RequestPreVote implements raft.WithPreVote.
func (t *PatientTransport) RequestPreVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestPreVoteRequest,
	resp *raft.RequestPreVoteResponse) error {
	return callBoth(resp, func(over *raft.NetworkTransport, resp *raft.RequestPreVoteResponse) error {
		return over.RequestPreVote(id, target, args, resp)
	}, t.NetworkTransport, t.Unpooled)
}

// TimeoutNow implements raft.Transport.
func (t *PatientTransport) TimeoutNow(id raft.ServerID, target raft.ServerAddress, args *raft.TimeoutNowRequest,
	resp *raft.TimeoutNowResponse) error {
	return callSecondAfterFailure(resp, func(over *raft.NetworkTransport, resp *raft.TimeoutNowResponse) error {
		return over.TimeoutNow(id, target, args, resp)
	}, t.NetworkTransport, t.Unpooled)
}

// callBoth calls send with the first transport. It also calls send with the second transport if the
// first call fails or takes longer than silentAfter. It returns the first successful response, or
// the errors of both calls.
func callBoth[R any, T any](resp *R, send func(over T, resp *R) error, first, second T) error {
	type answer struct {
		resp R
		err  error
	}
	answers := make(chan answer, 2)
	over := func(t T) {
		var a answer
		a.err = send(t, &a.resp)
		answers <- a
	}
	go over(first)
	silent := time.NewTimer(silentAfter)
	defer silent.Stop()
	var failed error
	outstanding := 1
	select {
	case a := <-answers:
		if a.err == nil {
			*resp = a.resp
			return nil
		}
		failed, outstanding = a.err, 0
	case <-silent.C:
	}
	go over(second)
	for outstanding++; outstanding > 0; outstanding-- {
		a := <-answers
		if a.err == nil {
			*resp = a.resp
			return nil
		}
		failed = errors.Join(failed, a.err)
	}
	return failed
}

// callSecondAfterFailure calls send with the first transport. If this call fails within
// silentAfter, it calls send with the second transport. If the first call fails later, its error is
// returned, because raft may have abandoned the request.
func callSecondAfterFailure[R any, T any](resp *R, send func(over T, resp *R) error, first, second T) error {
	began := time.Now()
	failed := send(first, resp)
	if failed == nil || time.Since(began) > silentAfter {
		return failed
	}
	var answer R
	if err := send(second, &answer); err != nil {
		return errors.Join(failed, err)
	}
	*resp = answer
	return nil
}
