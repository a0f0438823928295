// Command echo is a pod with the protocols that proxies must forward: HTTP/1.1 and HTTP/2 without
// TLS on one port, WebSockets, and gRPC with a bidirectional stream.
package main

import (
	"fmt"
	"log"
	"net/http"
	"strings"

	"github.com/gorilla/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// echoStream returns each message of a stream when it arrives. After the message "end" it ends the
// stream with a trailer and a status.
func echoStream(_ any, s grpc.ServerStream) error {
	for {
		m := &wrapperspb.StringValue{}
		if err := s.RecvMsg(m); err != nil {
			return err
		}
		if m.Value == "end" {
			s.SetTrailer(metadata.Pairs("said", "bye"))
			return status.Error(codes.OutOfRange, "it was told to end")
		}
		m.Value = "echo " + m.Value
		if err := s.SendMsg(m); err != nil {
			return err
		}
	}
}

// echoWebSocket returns each message of a WebSocket.
func echoWebSocket(w http.ResponseWriter, r *http.Request) {
	up := websocket.Upgrader{CheckOrigin: func(*http.Request) bool { return true }, Subprotocols: []string{"echo"}}
	c, err := up.Upgrade(w, r, nil)
	if err != nil {
		return // the response is already sent
	}
	defer c.Close()
	for {
		kind, data, err := c.ReadMessage()
		if err != nil {
			return
		}
		if err := c.WriteMessage(kind, append([]byte("echo "), data...)); err != nil {
			return
		}
	}
}

func main() {
	rpc := grpc.NewServer()
	rpc.RegisterService(&grpc.ServiceDesc{ServiceName: "keelson.test.Echo", HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "Both", Handler: echoStream, ServerStreams: true,
			ClientStreams: true}}},
		struct{}{})
	mux := http.NewServeMux()
	mux.HandleFunc("/ws", echoWebSocket)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
			rpc.ServeHTTP(w, r)
			return
		}
		fmt.Fprintf(w, "asked by %s for %s", r.Proto, r.Host)
	})
	s := &http.Server{Addr: ":8080", Handler: mux, Protocols: &http.Protocols{}}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	log.Fatal(s.ListenAndServe())
}
