package replica_test

import (
	"context"
	"crypto/tls"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/storetest"
)

// Only holders of a certificate of the group's authority are heard, on either
// protocol of the peer port. F51
func TestStrangersAreRefused(t *testing.T) {
	c := storetest.NewCluster(t, 1, nil)
	address := c.Replica("r1").Address()
	foreign, err := storetest.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	_, stranger, err := foreign.Issue("r2")
	if err != nil {
		t.Fatal(err)
	}
	stranger.InsecureSkipVerify = true // the stranger does not care whom it talks to
	good := c.Config("r1").Network.ClientTLS
	nobody := &tls.Config{InsecureSkipVerify: true}

	for name, conf := range map[string]*tls.Config{"foreign certificate": stranger, "no certificate": nobody} {
		if err := askState(t, address, conf); err == nil {
			t.Errorf("gRPC with %s is answered", name)
		}
		if err := speakRaft(address, conf); err == nil {
			t.Errorf("raft with %s is answered", name)
		}
	}
	if err := askState(t, address, good); err != nil {
		t.Errorf("gRPC with a good certificate: %v", err)
	}
	if err := speakRaft(address, good); err != nil {
		t.Errorf("raft with a good certificate: %v", err)
	}
}

func askState(t *testing.T, address string, conf *tls.Config) error {
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(conf.Clone())))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err = storev1.NewPeerClient(conn).State(ctx, &storev1.StateRequest{})
	return err
}

// speakRaft connects and waits to see whether the other side hangs up: with
// TLS 1.3 a server's refusal comes after the client's handshake.
func speakRaft(address string, conf *tls.Config) error {
	conf = conf.Clone()
	conf.NextProtos = []string{"keelson-raft"}
	conn, err := tls.Dial("tcp", address, conf)
	if err != nil {
		return err
	}
	defer conn.Close()
	// An unknown kind of message: a listener of raft hangs up on it, in order.
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte{0xff}); err != nil {
		return err
	}
	if _, err := conn.Read(make([]byte, 1)); err != io.EOF {
		return err
	}
	return nil
}
