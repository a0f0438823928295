package drive

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// callTimeout is the timeout of a call. It is longer than any election, so that an election
	// alone fails no call.
	callTimeout = 20 * time.Second
	// retryDelay is the delay before a client retries.
	retryDelay = 5 * time.Millisecond
	// endGrace is how long an ended load waits for calls in progress. Calls without a response by
	// then have failed.
	endGrace = 2 * time.Second
	// keysOfClient is the number of keys that a client writes or reads in turn.
	keysOfClient = 100
)

// Target is a store as seen by a client.
type Target interface {
	// Put writes values[i] at keys[i] in one commit.
	Put(ctx context.Context, keys []string, values [][]byte) error
	// Get reads a key with a linearizable read. It returns an error if the key does not exist.
	Get(ctx context.Context, key string) error
	// List reads all keys with a prefix and their values.
	List(ctx context.Context, prefix string) (keys int, bytes int64, err error)
	// Watch starts a watch and returns. Until ctx ends, it calls seen for each put in order.
	Watch(ctx context.Context, prefix string, seen func(value []byte)) error
	// Backup reads the whole state and returns its size.
	Backup(ctx context.Context) (bytes int64, err error)
}

// Connection is one connection to one member.
type Connection struct {
	Member string
	Target Target
}

// Engine runs the requested loads through its connections.
type Engine struct {
	connections []Connection

	mu      sync.Mutex
	running map[int]chan struct{} // by request ID; closed to stop the load
	watches map[string]*watcherSet
}

// NewEngine returns an engine with the given connections.
func NewEngine(connections []Connection) *Engine {
	return &Engine{connections: connections, running: make(map[int]chan struct{}),
		watches: make(map[string]*watcherSet)}
}

// ExecuteRequest runs a requested load and returns its reply.
func (e *Engine) ExecuteRequest(ctx context.Context, o Request) Reply {
	if o.Do == DoEnd {
		e.endRequest(o.Of)
		return Reply{}
	}
	connections := e.connectionsTo(o.Through)
	if len(connections) == 0 {
		return ErrorReply(fmt.Errorf("order %s through %v: no such member", o.Do, o.Through))
	}
	switch o.Do {
	case DoPut, DoGet:
		return e.runClosedLoop(ctx, o, connections)
	case DoFill:
		return fillKeys(ctx, o, connections)
	case DoList:
		return listKeys(ctx, o, connections[0].Target)
	case DoPace:
		return putAtRate(ctx, o, connections[0].Target)
	case DoWatch:
		return e.startWatchers(ctx, o, connections)
	case DoWatched:
		return e.awaitWatchers(ctx, o)
	case DoBackup:
		began := time.Now()
		n, err := connections[0].Target.Backup(ctx)
		if err != nil {
			return ErrorReply(err)
		}
		return Reply{Bytes: n, Took: time.Since(began).Seconds()}
	}
	return ErrorReply(errors.New("unknown order " + o.Do))
}

func (e *Engine) connectionsTo(members []string) []Connection {
	if len(members) == 0 {
		return e.connections
	}
	var out []Connection
	for _, d := range e.connections {
		if slices.Contains(members, d.Member) {
			out = append(out, d)
		}
	}
	return out
}

// RegisterRequest registers a request whose load runs until it is stopped. The returned channel is
// closed when a request DoEnd stops it.
func (e *Engine) RegisterRequest(id int) <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	ended := make(chan struct{})
	e.running[id] = ended
	return ended
}

func (e *Engine) endRequest(id int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ended, ok := e.running[id]; ok {
		close(ended)
		delete(e.running, id)
	}
}

// loadTally merges the results of the clients of one load.
type loadTally struct {
	mu    sync.Mutex
	reply Reply
}

func (t *loadTally) addFailure(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reply.Failed++
	if t.reply.Error == "" {
		t.reply.Error = err.Error()
	}
}

func (t *loadTally) addCalls(micros []uint32, acks []int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reply.Micros = append(t.reply.Micros, micros...)
	t.reply.Acks = append(t.reply.Acks, acks...)
}

// runClosedLoop runs the clients of the load r. Each sends its next call when its previous call has
// returned.
func (e *Engine) runClosedLoop(ctx context.Context, r Request, connections []Connection) Reply {
	ended := e.RegisterRequest(r.ID)
	defer e.endRequest(r.ID)
	began := time.Now()
	stop := time.AfterFunc(r.Duration, func() { e.endRequest(r.ID) })
	defer stop.Stop()
	calls, abandon := context.WithCancel(ctx)
	defer abandon()
	go func() {
		select {
		case <-ended:
			time.AfterFunc(endGrace, abandon)
		case <-calls.Done():
		}
	}()
	var (
		all loadTally
		wg  sync.WaitGroup
	)
	for c := range r.Clients {
		wg.Go(func() { runClient(calls, r, c, connections[c%len(connections)].Target, ended, &all) })
	}
	wg.Wait()
	all.reply.Took = time.Since(began).Seconds()
	return all.reply
}

// runClient runs the client with this number in the closed loop of a load, until ended is closed.
// It adds its results to all.
func runClient(ctx context.Context, o Request, number int, target Target, ended <-chan struct{}, all *loadTally) {
	var (
		micros []uint32
		acks   []int64
	)
	defer func() { all.addCalls(micros, acks) }()
	values := [][]byte{RandomValue(o.Size)}
	keys := make([]string, keysOfClient)
	for i := range keys {
		if o.Do == DoGet {
			keys[i] = FillKey(o.Prefix, (number*keysOfClient+i)%o.Count)
		} else {
			keys[i] = fmt.Sprintf("/bench/%s/%d/%d", o.Prefix, number, i)
		}
	}
	for n := 0; ctx.Err() == nil; n++ {
		select {
		case <-ended:
			return
		default:
		}
		at := n % keysOfClient
		sent := time.Now()
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		var err error
		if o.Do == DoPut {
			err = target.Put(callCtx, keys[at:at+1], values)
		} else {
			err = target.Get(callCtx, keys[at])
		}
		cancel()
		if err != nil {
			all.addFailure(err)
			select {
			case <-time.After(retryDelay):
			case <-ctx.Done():
			}
			continue
		}
		now := time.Now()
		micros = append(micros, uint32(now.Sub(sent).Microseconds()))
		if o.Times {
			acks = append(acks, now.UnixMicro())
		}
	}
}

// RandomValue returns random bytes, which do not compress.
func RandomValue(size int) []byte {
	value := make([]byte, size, size+8)
	var word [8]byte
	for i := 0; i < size; i += 8 {
		binary.LittleEndian.PutUint64(word[:], rand.Uint64())
		copy(value[i:], word[:])
	}
	return value
}

// FillKey returns the n-th key that a request DoFill writes.
func FillKey(prefix string, n int) string { return fmt.Sprintf("%s%08d", prefix, n) }

// fillKeys writes Count keys. Their values differ, so that they cannot share memory.
func fillKeys(ctx context.Context, o Request, connections []Connection) Reply {
	var (
		all  loadTally
		next atomic.Int64
		wg   sync.WaitGroup
	)
	began := time.Now()
	for c := range o.Clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				first := int(next.Add(int64(o.Ops))) - o.Ops
				if first >= o.Count {
					return
				}
				var (
					keys   []string
					values [][]byte
				)
				for n := first; n < min(first+o.Ops, o.Count); n++ {
					keys = append(keys, FillKey(o.Prefix, n))
					values = append(values, RandomValue(o.Size))
				}
				callCtx, cancel := context.WithTimeout(ctx, callTimeout)
				err := connections[c%len(connections)].Target.Put(callCtx, keys, values)
				cancel()
				if err != nil {
					all.addFailure(err)
					return
				}
			}
		})
	}
	wg.Wait()
	all.reply.Took = time.Since(began).Seconds()
	return all.reply
}

func listKeys(ctx context.Context, o Request, target Target) Reply {
	var out Reply
	began := time.Now()
	for range o.Count {
		sent := time.Now()
		keys, bytes, err := target.List(ctx, o.Prefix)
		if err != nil {
			return ErrorReply(err)
		}
		out.Micros = append(out.Micros, uint32(time.Since(sent).Microseconds()))
		out.Keys, out.Bytes = keys, bytes
	}
	out.Took = time.Since(began).Seconds()
	return out
}
