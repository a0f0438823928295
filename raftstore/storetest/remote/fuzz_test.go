package remote

import (
	"context"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// What makes no sense is refused as such, and changes nothing.
func TestMalformedRequests(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	s := &server{store: m}
	ctx := context.Background()
	op := func(change func(*storev1.Op)) *storev1.RemoteCommitRequest {
		o := &storev1.Op{Kind: uint32(raftstore.OpPut), Key: "/a"}
		change(o)
		return &storev1.RemoteCommitRequest{Ops: []*storev1.Op{o}}
	}
	commits := map[string]*storev1.RemoteCommitRequest{
		"nothing":                 {},
		"empty op":                {Ops: []*storev1.Op{{}}},
		"no op":                   {Ops: []*storev1.Op{nil}},
		"kind that wraps to put":  op(func(o *storev1.Op) { o.Kind = 257 }),
		"negative TTL":            op(func(o *storev1.Op) { o.TtlMs = -1 }),
		"TTL beyond any duration": op(func(o *storev1.Op) { o.TtlMs = 1 << 62 }),
		"key that is no text":     op(func(o *storev1.Op) { o.Key = "\xff" }),
		"absent at a revision":    op(func(o *storev1.Op) { o.If = &storev1.Precondition{Absent: true, Revision: 1} }),
		"value of a deletion": op(func(o *storev1.Op) {
			o.Kind, o.Value = uint32(raftstore.OpDelete), []byte("x")
		}),
		"same key twice": {Ops: []*storev1.Op{op(func(*storev1.Op) {}).Ops[0],
			op(func(*storev1.Op) {}).Ops[0]}},
	}
	for name, req := range commits {
		if _, err := s.Commit(ctx, req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("commit of %s: %v", name, err)
		}
	}
	for _, limit := range []int64{-1, -1 << 63} {
		err := s.List(&storev1.RemoteListRequest{Limit: limit}, &chunks{ctx: ctx})
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("list with limit %d: %v", limit, err)
		}
	}
	progress := &storev1.RemoteWatchRequest{Ask: &storev1.RemoteWatchRequest_Progress{}}
	begin := &storev1.RemoteWatchRequest{Ask: &storev1.RemoteWatchRequest_Begin{}}
	for name, asks := range map[string][]*storev1.RemoteWatchRequest{
		"nothing": {{}}, "progress first": {progress}, "two beginnings": {begin, begin}, "nothing later": {begin, {}},
	} {
		if err := s.Watch(&asked{ctx: ctx, asks: asks}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("watch that asks %s: %v", name, err)
		}
	}
	if rev := m.Applied(); rev != 0 {
		t.Errorf("the store is at revision %d", rev)
	}
}

// Whatever message arrives, the answer is one that the contract knows.
func FuzzRequests(f *testing.F) {
	add := func(which byte, m proto.Message) {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(which, b)
	}
	add(0, &storev1.RemoteCommitRequest{Ops: []*storev1.Op{{Kind: 1, Key: "/a", Value: []byte("x"), TtlMs: 5}},
		Fence: 1})
	add(0,
		&storev1.RemoteCommitRequest{Ops: []*storev1.Op{{Kind: 3, Key: "/a", If: &storev1.Precondition{Revision: 1}}}})
	add(1, &storev1.RemoteGetRequest{Key: []byte("/a"), Local: true})
	add(2, &storev1.RemoteListRequest{Prefix: []byte("/"), Limit: 1, After: []byte("/a"), At: 1})
	add(3,
		&storev1.RemoteWatchRequest{
			Ask: &storev1.RemoteWatchRequest_Begin{Begin: &storev1.RemoteWatchBegin{Prefix: []byte("/"), After: 1}}})
	add(4, &storev1.RemoteCommitCalls{Calls: []*storev1.RemoteCommitCall{
		{Id: 1, TimeoutUs: 1000, Commit: &storev1.RemoteCommitRequest{Ops: []*storev1.Op{{Kind: 1, Key: "/a"}}}},
		{Id: 1}, {},
	}})
	m := storetest.NewMemory()
	f.Cleanup(m.Close)
	s := &server{store: m}
	f.Fuzz(func(t *testing.T, which byte, b []byte) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var err error
		switch which % 5 {
		case 0:
			req := new(storev1.RemoteCommitRequest)
			if proto.Unmarshal(b, req) == nil {
				_, err = s.Commit(ctx, req)
			}
		case 1:
			req := new(storev1.RemoteGetRequest)
			if proto.Unmarshal(b, req) == nil {
				_, err = s.Get(ctx, req)
			}
		case 2:
			req := new(storev1.RemoteListRequest)
			if proto.Unmarshal(b, req) == nil {
				err = s.List(req, &chunks{ctx: ctx})
			}
		case 3:
			req := new(storev1.RemoteWatchRequest)
			if proto.Unmarshal(b, req) == nil {
				err = s.Watch(&asked{ctx: ctx, asks: []*storev1.RemoteWatchRequest{req}, end: cancel})
			}
		case 4:
			req := new(storev1.RemoteCommitCalls)
			if proto.Unmarshal(b, req) == nil {
				err = s.Commits(&called{ctx: ctx, calls: []*storev1.RemoteCommitCalls{req}})
			}
		}
		switch code := status.Code(err); code {
		case codes.OK, codes.InvalidArgument, codes.OutOfRange, codes.Aborted, codes.Canceled:
		default:
			t.Errorf("answer %s: %v", code, err)
		}
	})
}

// chunks is the server's side of a list, which throws away what is sent.
type chunks struct {
	grpc.ServerStream
	ctx context.Context
}

func (c *chunks) Context() context.Context            { return c.ctx }
func (c *chunks) Send(*storev1.RemoteListChunk) error { return nil }

// called is the server's side of a stream of commits, whose client waits for
// no answer.
type called struct {
	grpc.ServerStream
	ctx   context.Context
	calls []*storev1.RemoteCommitCalls
}

func (c *called) Context() context.Context                { return c.ctx }
func (c *called) Send(*storev1.RemoteCommitReplies) error { return nil }
func (c *called) Recv() (*storev1.RemoteCommitCalls, error) {
	if len(c.calls) == 0 {
		return nil, io.EOF
	}
	next := c.calls[0]
	c.calls = c.calls[1:]
	return next, nil
}

// asked is the server's side of a watch, whose client asks some things and
// then goes away.
type asked struct {
	grpc.ServerStream
	ctx  context.Context
	asks []*storev1.RemoteWatchRequest
	end  func()
}

func (a *asked) Context() context.Context         { return a.ctx }
func (a *asked) Send(*storev1.RemoteEvents) error { return nil }
func (a *asked) Recv() (*storev1.RemoteWatchRequest, error) {
	if len(a.asks) == 0 {
		if a.end != nil {
			a.end()
		}
		return nil, io.EOF
	}
	next := a.asks[0]
	a.asks = a.asks[1:]
	return next, nil
}
