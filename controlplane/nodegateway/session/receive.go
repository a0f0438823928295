package session

import (
	"fmt"
	"time"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// receiveMessages receives the agent's messages until the stream ends. It queues work and does not
// wait for it.
func (n *nodeSession) receiveMessages() error {
	for {
		m, err := n.out.stream.Recv()
		if err != nil {
			return err
		}
		if m.Epoch != n.epoch {
			n.log.Debug("message of another epoch dropped", "epoch", n.epoch, "got", m.Epoch)
			continue
		}
		n.mu.Lock()
		n.lastMessage = time.Now()
		n.mu.Unlock()
		if err := n.handleMessage(m); err != nil {
			// A message that cannot be parsed does not end the session.
			n.log.Warn("message from agent", "err", err)
		}
	}
}

func (n *nodeSession) handleMessage(m *fleetv1.AgentMessage) error {
	switch k := m.Kind.(type) {
	case *fleetv1.AgentMessage_Heartbeat:
		n.handleHeartbeat(k.Heartbeat, time.Now())
	case *fleetv1.AgentMessage_Facts:
		if err := n.reporter.SetFacts(k.Facts); err != nil {
			return err
		}
		n.reporter.SyncNode()
	case *fleetv1.AgentMessage_PodStatus:
		return n.reporter.HandlePodStatus(k.PodStatus)
	case *fleetv1.AgentMessage_PodGone:
		return n.reporter.HandlePodGone(k.PodGone)
	case *fleetv1.AgentMessage_Event:
		return n.reporter.HandleEvent(k.Event)
	case *fleetv1.AgentMessage_Stages:
		n.reporter.RecordStages(k.Stages)
	case *fleetv1.AgentMessage_TokenRequest:
		n.reporter.HandleTokenRequest(k.TokenRequest)
	case *fleetv1.AgentMessage_Authorities:
		return n.setAuthorities(k.Authorities)
	default:
		return fmt.Errorf("node %s: unknown message %T", n.node, m.Kind)
	}
	return nil
}

// handleHeartbeat acknowledges a heartbeat immediately, on the receiving goroutine. It does not
// acknowledge it while this replica cannot commit writes; the agent then moves to another replica.
func (n *nodeSession) handleHeartbeat(h *fleetv1.Heartbeat, received time.Time) {
	n.reporter.AddClockSample(received.UnixNano() - h.SentUnixNano)
	n.srv.cfg.Gate.RecordApplied(n.node, h.ProxyRevision)
	n.srv.cfg.Heartbeats.RecordHeartbeat(n.node, received)
	if !n.srv.cfg.CanWrite() {
		return
	}
	interval, _ := n.srv.currentPace()
	ack := &fleetv1.HeartbeatAck{SentUnixNano: h.SentUnixNano, ReplicaUnixNano: received.UnixNano(),
		HeartbeatMillis: interval.Milliseconds()}
	err := n.sendMessage(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_HeartbeatAck{HeartbeatAck: ack}})
	if err != nil {
		n.End(err)
	}
}
